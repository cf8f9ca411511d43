"""Distil a small student with ALRA in a plain PyTorch loop.

    python examples/plain_loop.py

It takes seconds on a CPU, and needs no network: demo/teacher knows Python source, and the text is
losses.py.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[1]  # in a file of your own: Path("PATH/OF/THE/CHECKOUT")
sys.path.insert(0, str(ROOT))  # so that Python finds losses.py from any folder

import losses  # noqa: E402

FOLDER = ROOT / "demo/teacher"
teacher = AutoModelForCausalLM.from_pretrained(FOLDER).float()
torch.manual_seed(1)
config = AutoConfig.from_pretrained(FOLDER, hidden_size=96)  # a student of half the width
student = AutoModelForCausalLM.from_config(config).float()
optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3)

text = (ROOT / "losses.py").read_text()
ids = torch.tensor(AutoTokenizer.from_pretrained(FOLDER).encode(text))
for step, row in enumerate(ids.split(129)[:60]):  # 128 inputs each
    x = row[None, :-1]  # [B, T], here one row
    y = row[1:]  # [N] labels: the ids that follow; -100 would leave a position out
    z_s = student(x).logits.flatten(0, 1)  # [N, V]
    with torch.no_grad():
        z_t = teacher(x).logits.flatten(0, 1)
    loss, terms = losses.method_loss("alra", z_s, z_t, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(f"step {step}  loss {loss:.3f}  ce {terms['ce']:.3f}")
