"""The costs in the headers of configs come from formulas."""

import re

import configure
from model import PRESETS, flops_per_token
from tests.world import ROOT


def test_costs_in_headers_are_computed():
    for file in (ROOT / "config").glob("*.py"):
        cfg, head = configure.load([str(file)]), file.read_text().split("\n\n")[0]
        computed = {f"{4e-9 * (cfg.train_rows or 0) * (cfg.seq_len + 1):.1f} GB"}
        for size in ("200m", "500m") if cfg.teacher == configure.TEACHER else ():
            teacher, student = (flops_per_token(PRESETS[x], cfg.seq_len, x == size) for x in ("1.8b", size))
            flops = (teacher + len(cfg.methods) * student) * cfg.max_steps * cfg.batch_rows * cfg.seq_len
            if size == cfg.student or f"#   {size}  " in head:
                computed |= {f"{flops / 1e18:.1f}e18 FLOP", f"{flops / (0.4 * 989e12 * 3600):.1f} h"}
        told = re.findall(r"\d[\d.]*(?:e18 FLOP| G?FLOP| h| GiB| GB)\b", head)
        assert set(told) <= computed and (told or cfg.teacher != configure.TEACHER), file
