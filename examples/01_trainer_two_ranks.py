"""Fine-tune a Transformers model with `Trainer` on two ranks, documents packed and attention balanced.

    torchrun --nproc-per-node 2 examples/01_trainer_two_ranks.py

Every batch holds four documents of a rank. Some are twenty times as long as others, so without balancing one rank would
wait for the other in every layer. The lines that Steelyard adds are marked.
"""

import random
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import steelyard.integrations.transformers as st  # added

TEXT = "A steelyard is a balance with unequal arms: a small weight far out holds a large one close by. " * 5


def documents(count: int, seed: int) -> list[dict[str, list[int]]]:
    """Byte-level documents with many short and few long ones."""
    draw = random.Random(seed)
    lengths = [draw.choice([20, 30, 40, 60, 400]) for _ in range(count)]
    return [{"input_ids": list(TEXT[start : start + n].encode())} for start, n in enumerate(lengths)]


def main() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=512,
        )
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=6, per_device_train_batch_size=4, per_device_eval_batch_size=4,
            learning_rate=3e-3, logging_steps=2, eval_strategy="steps", eval_steps=6, save_strategy="no", seed=1,
            prediction_loss_only=True, remove_unused_columns=False, report_to="none", use_cpu=True, disable_tqdm=True,
            lr_scheduler_type="constant",
        )  # fmt: skip
        attached = st.attach(model, tolerance=0.02)  # added, after the arguments: they join the ranks
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=documents(64, seed=0),
            eval_dataset=documents(11, seed=1),  # ragged: the last batch has fewer documents than ranks × 4
            data_collator=st.collate,  # added
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
            elif "eval_loss" in line:
                print(f"evaluation loss {line['eval_loss']:.3f}")
    attached.balancer.close()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
