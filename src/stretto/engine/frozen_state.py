"""The tensors of a model that are not trained."""

from torch import Tensor, nn

from stretto.flat import original_name


def frozen_state(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the frozen parameters and the buffers of a model, with their names."""
    frozen = ((name, p) for name, p in model.named_parameters() if not p.requires_grad)
    buffers = ((name, value) for name, value in model.named_buffers() if isinstance(value, Tensor))
    return [(original_name(name), tensor.detach()) for name, tensor in (*frozen, *buffers)]
