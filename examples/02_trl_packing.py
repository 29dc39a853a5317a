"""Supervised fine-tuning with TRL's `SFTTrainer(packing=True)` on two ranks, attention balanced.

    torchrun --nproc-per-node 2 examples/02_trl_packing.py

TRL packs documents into rows of at most `max_length` tokens and says where they end; Steelyard keeps them apart and
evens out the work. (TRL refuses packing together with context parallelism. Here no document is cut, and there is
nothing to refuse.)
"""

import random
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import steelyard.integrations.transformers as st  # added

WORDS = "a steelyard is balance with unequal arms small weight far out holds large one close by".split()  # noqa: SIM905


def tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer made on the spot: nothing is downloaded."""
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def texts(count: int) -> list[str]:
    draw = random.Random(0)
    return [" ".join(draw.choices(WORDS, k=draw.choice([5, 10, 20, 120]))) for _ in range(count)]


def main() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256, bos_token_id=None, eos_token_id=1, pad_token_id=0,
        )
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            output_dir=folder, max_steps=4, per_device_train_batch_size=1, packing=True, max_length=128,
            logging_steps=2, learning_rate=3e-3, report_to="none", use_cpu=True, bf16=False, disable_tqdm=True,
            save_strategy="no", activation_checkpointing=True, lr_scheduler_type="constant", seed=1,
        )  # fmt: skip
        attached = st.attach(model, tolerance=0.02)  # added, after the arguments: they join the ranks
        trainer = SFTTrainer(
            model=model,
            args=arguments,
            train_dataset=Dataset.from_dict({"text": texts(160)}),
            processing_class=tokenizer(),
            callbacks=[st.BalanceCallback(attached)],  # added
        )
        trainer.train()
    if arguments.process_index == 0:
        for line in trainer.state.log_history:
            if "loss" in line:
                print(
                    f"step {line['step']}: loss {line['loss']:.3f}, busiest rank over the mean "
                    f"{line['steelyard/work_max_over_mean']:.3f}, without balancing "
                    f"{line['steelyard/work_max_over_mean_packed']:.3f}"
                )
    attached.balancer.close()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
