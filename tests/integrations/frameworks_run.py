"""Trains a tiny model for two steps with each framework on however many ranks it is started with; prints one JSON line.

The documents of a step are the same for any number of ranks, so the figures must be, too. Started by
`test_transformers_frameworks`.
"""

from __future__ import annotations

import json
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import transformers
import transformers_ranks as tiny_models
from accelerate import Accelerator
from by_hand import DOCS, STEPS, figures, mean_loss
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

import steelyard.integrations.transformers as st
from steelyard.observe.meter import Meter


def with_trainer(ranks: int, accumulation: int, checkpointing: bool, ping_pong: bool = False) -> dict[str, Any]:
    model = tiny_models.tiny()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=STEPS, per_device_train_batch_size=8 // (ranks * accumulation),
            per_device_eval_batch_size=4 // ranks, gradient_accumulation_steps=accumulation, learning_rate=0.05,
            optim="sgd", lr_scheduler_type="constant", max_grad_norm=0.0, logging_steps=1, save_strategy="no",
            report_to="none", use_cpu=True, disable_tqdm=True, remove_unused_columns=False, prediction_loss_only=True,
            activation_checkpointing=checkpointing, train_sampling_strategy="sequential",
        )  # fmt: skip
        slow = LayerClock()
        attached = st.attach(model, tolerance=0.0, timeout_s=60, meter=Meter(clock=slow))
        model.model.layers[0].mlp.register_forward_hook(slow.forward)
        trainer = Trainer(
            model=st.PingPong(model) if ping_pong else model, args=arguments, train_dataset=DOCS, eval_dataset=DOCS[:5],
            data_collator=st.collate, callbacks=[st.BalanceCallback(attached)],
        )  # fmt: skip
        order = tiny_models.recorded(attached)
        trainer.train()
        lines = [line for line in trainer.state.log_history if "loss" in line]
        weights = figures(model, [])["weights"]
        first_step = order[: len(order) // STEPS]
        slow.on = True
        eval_loss = trainer.evaluate()["eval_loss"]  # 5 documents: the last batch is ragged
        rank = arguments.process_index
        mine = DOCS[rank:5:ranks]
        evaluated = attached.evaluate(
            st.collate([doc]) for doc in mine
        )  # 3 batches on one of two ranks, 2 on the other
        trainer.accelerator.even_batches = False  # as TrainingArguments' accelerator_config sets it
        evaluated_by_loader = attached.evaluate(trainer.get_eval_dataloader())
        evaluated_by_hand = mean_loss(model, attached, DOCS[:5])
        if not ping_pong:
            trainer.train()
    attached.detach()
    return figures(
        model, [line["loss"] for line in lines], evaluated_by_hand=evaluated_by_hand, eval_loss=eval_loss,
        evaluated=evaluated, evaluated_by_loader=evaluated_by_loader, log=lines[-1], trained_weights=weights,
        order=first_step, slow=[line for line in trainer.state.log_history if "steelyard/slowest_rank" in line][-1],
    )  # fmt: skip


class LayerClock:
    """A clock that goes on by a second with every forward pass of a layer: by three on rank 1, once that is slow."""

    def __init__(self) -> None:
        self.now_s, self.on = 0.0, False

    def __call__(self) -> float:
        return self.now_s

    def forward(self, *_: Any) -> None:
        slow = self.on and dist.is_initialized() and dist.get_rank() == 1
        self.now_s += 3.0 if slow else 1.0


def with_accelerate(ranks: int) -> dict[str, Any]:
    accelerator = Accelerator(cpu=True)
    model = tiny_models.tiny()
    attached = st.attach(model, tolerance=0.0, timeout_s=60)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = torch.utils.data.DataLoader(DOCS, batch_size=8 // ranks, collate_fn=st.collate)
    runner, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        plan = attached.plan(batch)
        loss = runner(**batch, steelyard_plan=plan, num_items_in_batch=plan.label_count).loss
        accelerator.backward(loss * ranks)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "sum")))
    attached.detach()
    return figures(model, losses)


def with_trl(ranks: int) -> dict[str, Any]:
    model = tiny_models.tiny()
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(tiny_models.VOCAB)}, unk_token="w0"))
    processing = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w2", unk_token="w0")
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            output_dir=folder, max_steps=STEPS, per_device_train_batch_size=2 // ranks, packing=True, max_length=48,
            learning_rate=0.05, optim="sgd", lr_scheduler_type="constant", max_grad_norm=0.0, logging_steps=1,
            bf16=False, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
            activation_checkpointing=True, train_sampling_strategy="sequential",
        )  # fmt: skip
        attached = st.attach(model, tolerance=0.0, timeout_s=60)
        trainer = SFTTrainer(
            model=model, args=arguments, train_dataset=Dataset.from_list(DOCS), processing_class=processing
        )
        packed = trainer.train_dataset  # rows of documents, as TRL packed them: two rows make a step
        rows = [
            [ids.tolist() for ids in torch.tensor(row["input_ids"]).split(row["seq_lengths"])]
            for row in packed.select(range(2 * STEPS))
        ]
        trainer.train()
    attached.detach()
    by_step = [rows[2 * step] + rows[2 * step + 1] for step in range(STEPS)]
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return figures(model, losses, documents_by_step=by_step)


def main() -> None:
    transformers.utils.logging.set_verbosity_error()
    TrainingArguments(output_dir=tempfile.mkdtemp(), use_cpu=True, report_to="none").device  # noqa: B018 - joins the ranks
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    found = {
        "trainer": with_trainer(ranks, accumulation=1, checkpointing=False),
        "accumulated": with_trainer(ranks, accumulation=2, checkpointing=True),
        "ping_pong": with_trainer(ranks, accumulation=1, checkpointing=False, ping_pong=True),
        "accelerate": with_accelerate(ranks),
    }
    if ranks <= 2:  # a step of it is two packed rows
        found["trl"] = with_trl(ranks)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print("RESULT " + json.dumps(found))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
