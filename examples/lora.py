"""LoRA: only the adapters are trained, sent and saved; the base model stays frozen on every rank.

    pip install 'stretto[recipes]'
    torchrun --nproc-per-node 2 examples/lora.py

The base is a tiny Llama with random weights, so that nothing has to be downloaded; for a real one, replace `make_base`
by `AutoModelForCausalLM.from_pretrained(...)`. The text is one sentence, which the adapters learn by heart.
"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import stretto

TEXT = b"In a fugue, a stretto is where the next voice enters before the last one has finished. "
UPDATES = 60


def make_base() -> PreTrainedModel:
    torch.manual_seed(0)  # every rank takes rank 0's weights anyway
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            initializer_range=0.2,
        )
    )


def make_batch(index: int, rank: int) -> torch.Tensor:
    """Four pieces of 48 bytes, cut at places that differ by batch and rank."""
    letters = torch.frombuffer(bytearray(TEXT * 2), dtype=torch.uint8).long()
    starts = torch.randint(len(TEXT), (4,), generator=torch.Generator().manual_seed(1000 * index + rank))
    return torch.stack([letters[start : start + 48] for start in starts.tolist()])


def main() -> None:
    adapters = LoraConfig(r=8, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(make_base(), adapters)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    total = sum(parameter.numel() for parameter in model.parameters())

    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(
        optimizer, start_factor=1.0, end_factor=0.1, total_iters=UPDATES
    )
    parallel = stretto.DataParallel(model, optimizer, scheduler=scheduler, micro_batches=2)
    if parallel.rank == 0:
        print(f"{sum(parameter.numel() for parameter in trained)} of {total} parameters are trained")

    batches = (make_batch(index, parallel.rank) for index in range(2 * UPDATES))
    for letters in parallel.feed(batches):
        update = parallel.backward(model(input_ids=letters, labels=letters).loss)
        if update and update.step % 20 == 0 and parallel.rank == 0:
            print(f"update {update.step}: loss {update.loss:.3f}, {update.sent_bytes} bytes sent")
    parallel.finish()

    if parallel.rank == 0:
        model.save_pretrained("adapters")
        print("the adapters are in the folder adapters")


if __name__ == "__main__":
    main()
