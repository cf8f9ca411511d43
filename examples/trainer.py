"""Distil a small student with ALRA in transformers' Trainer.

    python examples/trainer.py

It takes seconds on a CPU, and needs no network: demo/teacher knows Python source, and the text is
losses.py. Trainer needs the package `accelerate`.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

ROOT = Path(__file__).parents[1]  # in a file of your own: Path("PATH/OF/THE/CHECKOUT")
sys.path.insert(0, str(ROOT))  # so that Python finds losses.py from any folder

import losses  # noqa: E402

FOLDER = ROOT / "demo/teacher"
teacher = AutoModelForCausalLM.from_pretrained(FOLDER).float()


class DistilTrainer(Trainer):
    """A Trainer that distils from `teacher`, which is on the student's device."""

    loss_is_scaled_for_ga = False  # a mean: Trainer divides it by gradient_accumulation_steps

    def compute_loss(self, model, inputs, return_outputs=False, **_):
        y = inputs.pop("labels")[:, 1:].flatten()  # [N], -100 where ignored
        outputs = model(**inputs)
        z_s = outputs.logits[:, :-1].flatten(0, 1)  # [N, V]
        with torch.no_grad():
            z_t = teacher(**inputs).logits[:, :-1].flatten(0, 1)
        loss, _ = losses.method_loss("alra", z_s, z_t, y)
        return (loss, outputs) if return_outputs else loss


config = AutoConfig.from_pretrained(FOLDER, hidden_size=96)  # a student of half the width
student = AutoModelForCausalLM.from_config(config).float()
text = (ROOT / "losses.py").read_text()
ids = torch.tensor(AutoTokenizer.from_pretrained(FOLDER).encode(text))
rows = [{"input_ids": row, "labels": row} for row in ids.split(128)[:80]]
args = TrainingArguments(
    use_cpu=True, num_train_epochs=1, learning_rate=3e-3, logging_steps=2, save_strategy="no"
)
DistilTrainer(student, args, train_dataset=rows).train()
