"""The recipe `language`: a causal language model on local text, with new parameters or from a model folder."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from stretto import errors
from stretto.disk import replace_folder
from stretto.fields import check_at_least, check_fields
from stretto_lab.recipes.blocks import Packed, Streams, blocks_of
from stretto_lab.recipes.language_models import check_model, language_model, tokenizer_of, with_lora
from stretto_lab.recipes.optimizers import AdamW, LanguageOptimizer, Schedule, language_optimizer
from stretto_lab.recipes.rows import Heldout, Sides, Unit, check_column, read_sides
from stretto_lab.recipes.stdlib_gpt import next_token_loss
from stretto_lab.recipes.task import MeanLoss, Task, extra
from stretto_lab.recipes.text import Subwords, Window, sampled

BYTES = 257
"""Smallest vocabulary: a BPE without training has the bytes, and the end of a document."""
TRAINED_ON = 100_000_000
"""Most characters of text to train a BPE on; this takes about a minute."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Documents:
    """The definition of a document."""

    unit: Unit = "file"
    """In text files a document is a file, a paragraph (up to an empty line) or a line; in other formats it is a row."""

    column: str = "text"
    """Column of the rows that holds the text."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnTokens:
    """A byte-level BPE that the run trains if there is no tokenizer."""

    vocabulary: int = BYTES
    """Number of tokens; 257, the bytes and the end of a document, needs no training."""

    folder: str | None = None
    """Folder that it is written to, or read from if it exists; by default a run uses its own folder, and so has the
    same tokenizer after a resume."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_at_least(self, vocabulary=BYTES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Language:
    """A causal language model on your own text; pre-training, fine-tuning, LoRA, with no download."""

    loss_unit: ClassVar[str] = "nats per token"
    """Unit of the losses."""

    model: str = "gpt2"
    """Folder, config.json or the name of a size; a folder contains parameters, the others start with new ones. Names
    are gpt2 and llama-tiny."""

    data: str | None = None
    """File or folder of text, JSON lines or Parquet, or a folder that save_to_disk of datasets has written. File
    endings decide the format (.txt, .md, .raw, .json, .jsonl, .parquet)."""

    tokenizer: str | None = None
    """Folder of a tokenizer; None uses the tokenizer in the model's folder, or else trains one (own_tokens)."""

    length: int = 256
    """Tokens the model reads at once."""

    batch: int = 8
    """Blocks per micro-batch."""

    lora_rank: int | None = None
    """Rank of LoRA's adapters, which are then the only trained parameters; None trains the whole model."""

    optimizer: LanguageOptimizer = "adamw"
    """Optimizer of the model; its own options are below."""

    lr: float | None = None
    """Learning rate after the warm-up; None takes 0.0006 for adamw and muon, and 0.01 for adafactor."""

    dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of parameters and activations."""

    readers: int = 1
    """Processes per rank that read and tokenise ahead; 0 does it in the loop."""

    documents: Documents = field(default_factory=Documents)
    """The definition of a document."""

    heldout: Heldout = field(default_factory=Heldout)
    """The held-out data."""

    own_tokens: OwnTokens = field(default_factory=OwnTokens)
    """The tokenizer that the run trains if there is none."""

    adamw: AdamW = field(default_factory=AdamW)
    """Options of adamw, also used together with muon."""

    schedule: Schedule = field(default_factory=Schedule)
    """The learning rate over the updates."""

    sample: int = 200
    """Most tokens of the sample text at the end."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_at_least(self, length=2, batch=1, lora_rank=1, lr=0, readers=0, sample=0)
        if self.optimizer == "muon" and self.lora_rank is not None:
            raise errors.ConfigError(
                f"optimizer=muon with lora_rank={self.lora_rank}: muon makes steps of whole matrices orthogonal, and "
                "adapters are factors of them; expected adamw or adafactor"
            )

    def check(self) -> None:
        """Raise if files are missing or wrong, before there are workers; see `OverFiles`."""
        check_model(self.model)
        if self.tokenizer is not None and not Path(self.tokenizer).is_dir():
            raise errors.ConfigError(f"tokenizer {self.tokenizer} is not a folder")
        self._sides()

    def kept_in(self, folder: str) -> "Language":
        """Return the same options, with a trained tokenizer kept in the run's folder; see `OverFiles`."""
        if self.own_tokens.folder is not None or self._given_tokenizer() is not None:
            return self
        own = dataclasses.replace(self.own_tokens, folder=str(Path(folder, "tokenizer")))
        return dataclasses.replace(self, own_tokens=own)

    @property
    def tokens_per_sample(self) -> int:
        """Tokens in a sample."""
        return self.length

    def build(self, rank: int, world_size: int, seed: int, updates: int | None) -> Task:
        """Build the task of one rank; see `TaskConfig.build` for arguments and errors."""
        train, heldout = self._sides()
        tokens = self._tokens(train, rank)
        model = language_model(
            self.model,
            vocabulary=tokens.vocabulary,
            length=self.length,
            dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[self.dtype],
            seed=seed,
        )
        if self.lora_rank is not None:
            model = with_lora(model, self.lora_rank, 2.0 * self.lora_rank, seed)
        optimizer = language_optimizer(self.optimizer, model, self.lr, self.adamw, usual_lr=0.0006)
        batches = self._blocks(heldout, tokens)
        if not any(batch.predicted for batch in batches):
            raise errors.ConfigError(
                f"the held-out side of {self.data} is empty: expected at least one token to predict"
            )
        return Task(
            model=model,
            optimizer=optimizer,
            scheduler=self.schedule.build(optimizer, updates),
            loader=Packed(
                Streams(train, self.documents.column, tokens),
                length=self.length,
                size=self.batch,
                rank=rank,
                world_size=world_size,
                seed=seed,
                workers=self.readers,
            ),
            loss=next_token_loss,
            evaluate=MeanLoss(batches, next_token_loss),
            sample=partial(sampled, prompt="The ", length=self.sample, tokens=tokens, context=self.length),
            publish=partial(_publish, model, tokens),
        )

    def _sides(self) -> Sides:
        sides = read_sides(self.data, self.heldout, self.documents.unit)
        for rows in sides:
            check_column(rows, str(self.data), self.documents.column)
        return sides

    def _given_tokenizer(self) -> str | None:
        return self.tokenizer or tokenizer_of(self.model)

    def _tokens(self, rows: Any, rank: int) -> Subwords:
        """Return the tokenizer; if it has to be trained, rank 0 writes it."""
        given = self._given_tokenizer()
        if given is not None:
            return Subwords.read(given)
        own = self.own_tokens
        if own.folder is not None and Path(own.folder).is_dir():
            return Subwords.read(own.folder)
        made = Subwords.trained(self._texts(rows) if own.vocabulary > BYTES else (), own.vocabulary)
        if own.folder is not None and rank == 0:
            replace_folder(Path(own.folder), made.write)
        return made

    def _texts(self, rows: Any) -> list[bytes]:
        """Return the texts for training a BPE, the first rows."""
        size, texts = 0, []
        for row in rows:
            text = row[self.documents.column] or ""
            texts.append(text.encode())
            size += len(text)
            if size >= TRAINED_ON:
                break
        return texts

    def _blocks(self, heldout: Any, tokens: Subwords) -> list[Window]:
        """Return the first held-out documents, joined and cut into blocks."""
        needed = self.heldout.samples * self.length + 1
        stream: list[int] = []
        for row in heldout:
            stream += [*tokens.encode((row[self.documents.column] or "").encode()), tokens.end]
            if len(stream) >= needed:
                break
        windows = blocks_of(torch.tensor(stream[:needed]), self.length, tokens.end)
        return [windows.batch(indices) for indices in torch.arange(len(windows)).split(self.batch)]


def _publish(model: Any, tokens: Subwords, state: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write files for `from_pretrained`: safetensors (only the adapters with LoRA), and the tokenizer."""
    tokens.write(folder)
    logging = extra("transformers.utils.logging", "a model folder")
    is_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # it would be drawn into the run's own display
    try:
        model.save_pretrained(folder, state_dict=dict(state))
    finally:
        if is_shown:
            logging.enable_progress_bar()
