"""Distil a small language model with ALRA: the whole method in one file, to read and to change.

    python prepare.py config/demo.py
    python examples/nano.py

The first command cuts Python source into rows of token ids. The second trains a student of 1.1M
parameters with a teacher of 2.6M, in two to three minutes of CPU time, and prints such lines:

    held-out CE  unigram 6.5929  teacher 2.2299
    step 20  loss 10.5109  gnorm 1.431  lr 7.50e-04
    ..
    step 480  loss 5.8960  gnorm 2.488  lr 9.00e-05
    step 480  held-out CE 5.5390

Your digits may differ slightly, as machines round differently, and updates amplify it. If other
programs use the cores, put OMP_NUM_THREADS=1 before the command. LESSON.md explains ALRA in words;
equations are numbered as in its paper. train.py makes the same updates with `config/demo.py
--methods=alra`.

Dimension key: N positions, T time, V vocabulary, k = d_max candidates.
"""

import dataclasses
import json
import math
import sys
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

sys.path.insert(0, f"{Path(__file__).parents[1]}")  # so that Python finds model.py

from lib.hf import load_tokenizer
from lib.rows import PAD, row_order
from model import Qwen2, init_student

# ----------------------------------------------------------------------------------------------
# settings, those of config/demo.py; a comment has the paper's value where it differs

method = "alra"  # or "vanilla_kd", or "pretrain", which ignores the teacher
teacher_dir = "demo/teacher"  # a folder or hub id; its tokenizer is that of the rows
data_dir = "data/demo"
out_dir = Path("out/nano", method)
student_shape = {  # what is not listed here is like the teacher's
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
seed = 1234  # of the student's first weights and of the order of rows

d_min, d_max = 3, 25  # ALRA: smallest and largest local set, tokens
gamma = 5.0  # ALRA: how fast a pair's weight falls with the gap between its two probabilities
eps = 1e-6  # ALRA: added to two denominators
tau = 0.5  # vanilla KD: temperature

max_steps = 480  # 126,400
batch_rows = 2  # 16
lr = 1.5e-3  # 6e-4
min_lr = 9e-5  # 6e-5
warmup_steps = 40  # 512
betas = (0.9, 0.98)
adam_eps = 1e-6
weight_decay = 1e-2
clip = 0.5  # largest norm of the gradient

log_every = 20
val_every = 120  # validates, and writes a checkpoint
val_rows = 64
device = "cuda" if torch.cuda.is_available() else "cpu"

# ----------------------------------------------------------------------------------------------
# objectives: logits of student and teacher [N, V], labels [N] -> loss [N], nats


def alra(z_s, z_t, y):
    """Adaptive Local Relational Alignment, Algorithm 1 of the paper."""
    logp_s, logp_t = z_s.log_softmax(-1), z_t.log_softmax(-1)  # Eq. 2, at temperature 1

    C = z_s.topk(d_max).indices  # [N, k], Eq. 4: the student proposes tokens, best first
    top_1 = z_t.argmax(-1)
    missing = (top_1[:, None] != C).all(-1)
    C[missing, -1] = top_1[missing]  # Eq. 5: the teacher's top-1 is the anchor
    c_t, order = logp_t.gather(-1, C).sort(descending=True)  # [N, k]: the teacher ranks them
    C = C.gather(-1, order)
    c_s = logp_s.gather(-1, C)

    # The local set is smaller where the teacher is surer than on average over the row.
    E = torch.special.entr(c_t.softmax(-1)).sum(-1).exp()  # Eq. 6: effective support, tokens
    d = (d_min + (d_max - d_min) * E / (E.mean() + eps)).round().clamp(d_min, d_max)  # Eq. 7, 8
    local = torch.arange(d_max, device=device) < d[:, None]  # [N, k], Eq. 9: the first d of C
    rest = torch.ones_like(z_t).scatter(-1, C, (~local).to(z_t))  # [N, V]: 0 at local tokens

    # ALD: each region as a whole, and the distribution within it
    loss = 0
    for log_s, log_t, region in ((c_s, c_t, local), (logp_s, logp_t, rest)):
        p_s, p_t = log_s.exp() * region, log_t.exp() * region
        a_s, a_t = p_s.sum(-1), p_t.sum(-1)  # [N], Eq. 10: masses
        gap = a_t.log() - a_s.log()
        within = (p_t * (log_t - log_s)).sum(-1) / a_t - gap  # Eq. 11, 12
        loss = loss + a_t * gap + within  # Eq. 14

    # SWPRA: each pair of local tokens as a two-way softmax, [N, k, k]
    odds_s, odds_t = (c[:, :, None] - c[:, None, :] for c in (c_s, c_t))
    kl = 0
    for sign in (1, -1):
        log_s, log_t = F.logsigmoid(sign * odds_s), F.logsigmoid(sign * odds_t)
        kl = kl + log_t.exp() * (log_t - log_s)  # Eq. 16
    q = c_s.detach().exp()  # no gradient: else the student could ignore pairs it gets wrong
    q_i, q_j = q[:, :, None], q[:, None, :]
    score = (-gamma * (q_i - q_j).abs()).exp() * (q_i + q_j)  # Eq. 19
    score = score * (local[:, :, None] & local[:, None, :]).triu(1)  # Eq. 15: each pair once
    kappa = score / (score.sum((1, 2), keepdim=True) + eps)  # Eq. 20
    return loss + (kappa * kl).sum((1, 2))  # Eq. 17, 22


def vanilla_kd(z_s, z_t, y):
    """KL to the teacher and cross-entropy, half and half."""
    logp_s, logp_t = (z_s / tau).log_softmax(-1), (z_t / tau).log_softmax(-1)
    kl = (logp_t.exp() * (logp_t - logp_s)).sum(-1)  # Eq. 3
    return 0.5 * kl + 0.5 * pretrain(z_s, z_t, y)


def pretrain(z_s, z_t, y):
    """Cross-entropy with the text: no distillation."""
    return F.cross_entropy(z_s, y, reduction="none")


objective = {"alra": alra, "vanilla_kd": vanilla_kd, "pretrain": pretrain}[method]

# ----------------------------------------------------------------------------------------------
# rows of token ids, as prepare.py writes them

manifest = json.loads(Path(data_dir, "val.json").read_text())
train, val = (
    np.memmap(f"{data_dir}/{name}.bin", np.uint32, "r").reshape(-1, manifest["row_len"])
    for name in ("train", "val")
)


def inputs_labels(row):
    """Return the inputs [1, T] and labels [T] of a row, without the PAD that fills up its end."""
    ids = torch.from_numpy(row[row != PAD].astype(np.int64)).to(device)
    return ids[None, :-1], ids[1:]


@torch.no_grad()
def held_out_ce(model):
    """Return the mean CE over the labels of the first `val_rows` held-out rows."""
    rows = map(inputs_labels, val[:val_rows])
    return torch.cat([pretrain(model(x)[0], None, y) for x, y in rows]).mean()


# ----------------------------------------------------------------------------------------------
# teacher, student, optimizer


def learning_rate(step):
    """Return the rate of an update: linear warm-up, then half a cosine down to `min_lr`."""
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    part = (step + 1 - warmup_steps) / (max_steps - warmup_steps)
    return min_lr + (lr - min_lr) * 0.5 * (1 + math.cos(math.pi * part))


teacher = Qwen2.from_pretrained(teacher_dir, device=device)  # frozen
student = init_student(dataclasses.replace(teacher.config, **student_shape), seed).to(device)
optimizer = torch.optim.AdamW(student.parameters(), lr, betas, adam_eps, weight_decay)

out_dir.mkdir(parents=True, exist_ok=True)
checkpoint = out_dir / "checkpoint.pt"
first = 0
if checkpoint.exists():
    saved = torch.load(checkpoint, device)
    student.load_state_dict(saved["student"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["step"]
    print(f"resumes from {checkpoint}, step {first}; delete it to start anew")

# ----------------------------------------------------------------------------------------------
# training

print(f"held-out CE  unigram {manifest['unigram_ce']:.4f}  teacher {held_out_ce(teacher):.4f}")
since_log = []  # the losses [N] of each forward batch since the last log line
for step in range(first, max_steps):
    for i in row_order(step, batch_rows, len(train), seed):
        # One row is a forward batch, the paper's T_B (Eq. 1), over which ALRA takes its mean.
        x, y = inputs_labels(train[i])
        with torch.no_grad():
            z_t = teacher(x)[0]  # [N, V]
        loss = objective(student(x)[0], z_t, y)  # [N]
        (loss.mean() / batch_rows).backward()  # gradients add up over the rows of an update
        since_log.append(loss.detach())
    gnorm = torch.nn.utils.clip_grad_norm_(student.parameters(), clip)
    optimizer.param_groups[0]["lr"] = learning_rate(step)
    optimizer.step()
    optimizer.zero_grad()

    done = step + 1
    if done % log_every == 0:
        loss = torch.cat(since_log).mean()
        print(f"step {done}  loss {loss:.4f}  gnorm {gnorm:.3f}  lr {learning_rate(step):.2e}")
        since_log.clear()
    if done % val_every == 0 or done == max_steps:
        print(f"step {done}  held-out CE {held_out_ce(student):.4f}")
        state = {"student": student.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state | {"step": done}, checkpoint)

student.save_pretrained(out_dir / "model", load_tokenizer(teacher_dir))  # as transformers loads it
checkpoint.unlink(missing_ok=True)  # the next run starts anew
