"""The costs in the headers of configs come from formulas."""

import re

import configure
from model import PRESETS, flops_per_token
from tests.world import ROOT

COST = r"\d[\d.]*(?:e18 FLOP| G?FLOP| h| GiB| GB)\b"


def test_costs_in_headers_are_computed():
    for file in (ROOT / "config").glob("*.py"):
        cfg = configure.load([str(file)])
        header = file.read_text().split("\n\n")[0]
        costs = {f"{4e-9 * (cfg.train_rows or 0) * (cfg.seq_len + 1):.1f} GB"}
        of_paper = cfg.teacher == configure.TEACHER
        for size in ("200m", "500m"):
            if of_paper and (size == cfg.student or f"#   {size}  " in header):
                teacher = flops_per_token(PRESETS["1.8b"], cfg.seq_len, False)
                student = flops_per_token(PRESETS[size], cfg.seq_len, True)
                n_tokens = cfg.max_steps * cfg.batch_rows * cfg.seq_len
                flops = (teacher + len(cfg.methods) * student) * n_tokens
                costs |= {f"{flops / 1e18:.1f}e18 FLOP", f"{flops / (0.4 * 989e12 * 3600):.1f} h"}
        stated = set(re.findall(COST, header))
        assert stated <= costs, file
        assert stated or not of_paper, file
