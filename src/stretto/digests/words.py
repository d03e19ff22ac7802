"""A tensor's bytes as 64-bit words."""

import torch
from torch import Tensor

WORD_BYTES = 8


def bytes_of(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes in the order of its elements, `(nbytes,)` uint8; a view where it is contiguous."""
    if tensor.dtype == torch.uint8 and tensor.dim() == 1 and tensor.is_contiguous():
        return tensor
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def words_of(content: Tensor) -> Tensor:
    """Return `content`, uint8, as int64 words: a view, or a copy where it has to be filled up with zeros."""
    is_whole = content.numel() % WORD_BYTES == 0 and content.data_ptr() % WORD_BYTES == 0
    if is_whole and content.storage_offset() % WORD_BYTES == 0:
        return content.view(torch.int64)
    padded = content.new_zeros(-(-content.numel() // WORD_BYTES) * WORD_BYTES)
    padded[: content.numel()] = content
    return padded.view(torch.int64)


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one size hold the same bytes.

    By words, because `torch.equal` takes seven times as long by bytes.
    """
    return torch.equal(words_of(bytes_of(one)), words_of(bytes_of(other)))
