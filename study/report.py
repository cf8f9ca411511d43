"""The report of a comparison, README.md and figures in OUT/report, from what study/compare.py leaves there and from the logs.

`students.jsonl` has a line for each planned student: its figures over held-out rows and the folder of its logs, or why there
are none. `rates.jsonl` has the trials, `settings.json` the config.
"""

import itertools
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lib.errors import require
from lib.files import read_json, read_lines
from lib.stats import FIGURES, differences, p_text
from run import tables
from run.paper import LAYOUT, PAPER

ORDERED = ("ce", "kl", "top1")  # of FIGURES: the order of methods by these is put beside the paper's


@dataclass(frozen=True)
class Spec:
    """What is compared beside the config: from flags, or from `_compare` in a config file."""

    title: str = "Comparison"
    reference: str | None = None  # the method that differences are taken from; None: vanilla_kd, or else the first
    seeds: int = 3  # from 1 on; seed 0 is the trials'
    fewer_seeds: dict[str, int] = field(default_factory=dict)  # by method
    rows: int = 512  # held-out rows that are scored: those after the `val_max_rows` of the trials
    tune: tuple[str, ...] = ()  # "lr=1e-3,3e-3", "vanilla_kd.tau=0.5,1"
    trial_steps: int | None = None  # updates of a trial, its schedule as much shorter; None: those of a student
    chosen: dict[str, dict] = field(default_factory=dict)  # settings by method, in place of its best trial's
    at: str = "updates"  # what is equal: "updates", or "flops" of student and teacher together
    tables: tuple[tuple[str, tuple[str, ...], str], ...] = ()  # title, methods, reference; none: one of all methods
    paper: bool = False  # put our order of methods beside the paper's

    def seeds_of(self, name: str) -> int:
        return min(self.seeds, self.fewer_seeds.get(name, self.seeds))

    def layout(self, methods: list[str]) -> list[tuple]:
        """`tables`, or one table of all methods against the reference."""
        reference = self.reference or ("vanilla_kd" if "vanilla_kd" in methods else methods[0])
        return list(self.tables) or [("Methods", methods, reference)]


def read(folder: Path) -> list[dict]:
    """What is known of each planned student. `UserError` where none has a result."""
    file = folder / "students.jsonl"
    require(file.is_file(), f"{file}: not there; run the same command without --report first")
    students = read_lines(file, ("method", "seed"))
    says = f"{folder}: no student has a result; {students[0]['method']}: {students[0].get('stopped')}"
    require(not all("stopped" in x for x in students), says)
    return students


def report(spec: Spec, out: Path) -> tuple[list[dict], str]:
    """Write README.md and the figures into OUT/report -> its students; the first table, and where rates ended."""
    results, sections = out / "report", []
    students, settings = read(results), read_json(results / "settings.json")
    logs: dict[int, dict[str, Path]] = {}  # seed -> method -> folder
    figures: tables.Figures = {x["method"]: {} for x in students}
    for x in students:
        figures[x["method"]] |= {} if "stopped" in x else {x["seed"]: x}
        if "folder" in x:
            logs.setdefault(x["seed"], {})[x["method"]] = out / x["folder"]
    for title, methods, ref in spec.layout([*figures]):
        shown = {m: figures[m] for m in dict.fromkeys((*methods, ref)) if m in figures}
        others = [m for m in shown if m != ref]
        if any(shown.values()) and ((others and ref in shown) or not sections):
            sections += [tables.heldout(f"## {title}", shown, ref), leads(logs, title, others, ref)]
    tried = trials(results, settings, spec.chosen)
    text = [*heading(spec, students, settings), *itertools.chain(*sections), *costs(students, figures)]
    text += [*(beside_the_paper(figures) if spec.paper else []), *tried]
    if drawn := draw_figures(logs, results):
        said = "Curves: means over all seeds, with 95 % intervals where there are several. Budget (of adaptive ones) and anchoring (of the teacher, "
        said += f"whatever the method), where histograms were logged, the paper's Figures 3 and 4: seed {min(logs)}. docs/running.md explains them."
        text += ["## Training", "", said, "", *(f"![{name}]({name}.png)\n" for name in drawn)]
    (results / "README.md").write_text("\n".join(text).rstrip() + "\n")
    return students, "\n".join([*sections[0], tried[-2], ""])


def heading(spec: Spec, students: list[dict], settings: dict) -> list[str]:
    """Who was compared on what, by which machine, and how to read the tables."""
    done, seeds = next(x for x in students if "stopped" not in x), sorted({x["seed"] for x in students})
    versions = {
        ", ".join(f"{name} {version}" for name, version in x["versions"].items()) for x in students if "versions" in x
    }
    used = [sorted({x[key] for x in students if x.get(key)}) for key in ("machine", "git_commit")] + [sorted(versions)]
    left = sum(map(spec.seeds_of, {m for _, methods, ref in spec.tables for m in (*methods, ref)})) - len(students)
    text = [f"# {spec.title}", "", "Written by `compare.py` from the files beside it and the logs; do not edit.", "",
            f"{len(students)} students of shape `{settings['student']}`, seeds {', '.join(map(str, seeds))}: {settings['max_steps']:,} updates "
            f"of {settings['batch_rows']} rows of {settings['seq_len']} inputs. Scored on:", "", *tables.scored(done), "",
            "Machine, commit, versions: " + "; ".join(", ".join(values) for values in used) + ".", "",
            *([f"**Not complete**: {left} students that are planned have not been made yet.", ""] if left > 0 else []),
            "± is half the width of a 95 % t interval over seeds, not over texts: all are scored on the same rows. That of two is wide. Differences are paired by seed. p: paired t "
            "test, Holm-corrected over a table's rows, figure by figure; intervals are not. **Best**, *second* of a column.", ""]  # fmt: skip
    if settings["at"] == "flops" or any(x["method"].endswith("@flops") for x in students):
        text += ["At equal FLOPs (@flops): a method without a teacher makes more updates, until student and teacher have cost "
                 "the same. Left out: validation, the optimizer, the objectives, and that students share a pass of the teacher.", ""]  # fmt: skip
    failed = [f"- {x['method']} (seed {x['seed']}): {x['stopped']}" for x in students if "stopped" in x]
    return text + (["Without a result:", "", *failed, ""] if failed else [])


def leads(logs: dict[int, dict[str, Path]], title: str, methods: list[str], ref: str) -> list[str]:
    """The CE of training's validations less that of `ref`, at the quarters of training: whether a lead grows or shrinks."""
    ces: dict[str, dict[int, dict[int, float]]] = {}  # method -> updates -> seed -> CE
    for seed, method, folder in ((seed, *of_one) for seed, of_seed in logs.items() for of_one in of_seed.items()):
        for record in read_lines(folder / "log.jsonl", ["step"]):
            if record.get("val_ce") is not None:
                ces.setdefault(method, {}).setdefault(record["step"], {})[seed] = record["val_ce"]
    steps = sorted(ces.get(ref, {}))
    steps = sorted({steps[len(steps) * i // 4 - 1] for i in range(1, 5) if len(steps) * i // 4})
    body = [
        [m, *(differences([(ces[m].get(n, {}), ces[ref][n])])[0].text(4, "+") for n in steps)]
        for m in methods
        if steps and m in ces and max(ces[m]) == steps[-1]  # as long as the reference
    ]
    head = ["validation CE after updates", *(f"{n:,}" for n in steps)]
    said = f"{title}: difference to {ref} in the course of training, over the rows of the validations"
    return [said, "", *tables.grid(head, body), ""] if body else []


def costs(students: list[dict], figures: tables.Figures) -> list[str]:
    """A table of each method's settings, its students that have results, and what one of them cost."""
    body, planned = [], [x["method"] for x in students]
    for method, by_seed in figures.items():
        n, some = planned.count(method), list(by_seed.values())
        one, made = next(iter(some), {}), f"{n}" if len(some) == n else f"{len(some)} of {n}"
        given = {"lr": one["lr"], **one["settings"]} if some else {}
        given = [f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}" for key, value in given.items()]
        flops = [f"{one[key]:.3g}" if key in one else "–" for key in ("student_flops", "teacher_flops")]
        body.append([method, ", ".join(given) or "–", made, *flops])
    return ["## Settings and costs", "",
            "FLOPs of a student: its own training, without the objective, and the teacher's forward passes as if it shared them with no other.", "",
            *tables.grid(["", "settings", "n", "student FLOPs", "teacher FLOPs"], body), ""]  # fmt: skip


def beside_the_paper(figures: tables.Figures) -> list[str]:
    """Our order of methods beside the order of the paper's averages over tasks: Kendall's tau-b, and ranks."""
    from scipy.stats import kendalltau, rankdata  # half a second, and only here

    taus, places, sizes = [], [], ("200m", "500m")
    heads = [*(f"paper {size}" for size in sizes), *(f"our {FIGURES[k].heading}" for k in ORDERED)]
    for title, split, methods in LAYOUT:
        methods = [m for m in methods if figures.get(m)]
        common = set.intersection(*(set(figures[m]) for m in methods)) if len(methods) > 2 else ()
        if not common:
            continue
        scores = [[PAPER[size, split, m]["avg"] for m in methods] for size in sizes]  # more is better, in all columns
        for k in ORDERED:
            scores.append([FIGURES[k].sense * np.mean([figures[m][seed][k] for seed in common]) for m in methods])
        columns = [*zip(heads, scores, strict=True)]
        for (theirs, a), (mine, b) in itertools.product(columns[:2], columns[2:]):
            inner = [i for i, score in enumerate(a) if min(a) < score < max(a)]
            both = [kendalltau(np.take(a, some), np.take(b, some)) for some in (range(len(a)), inner) if some[1:]]
            texts = [f"{tau.statistic:+.2f}, p {p_text(tau.pvalue)}" for tau in both]
            taus.append([title, theirs, mine, *texts, *(["–"] if len(both) < 2 else [])])
        ranks = [rankdata(np.negative(column), "min") for column in scores]
        places += [[title, m, *(f"{rank[i]:.0f}" for rank in ranks)] for i, m in enumerate(methods)]
    if not taus:
        return []
    return ["## The paper's ordering and ours", "",
            "Kendall's tau-b between the order of the paper's averages over tasks and the order by our figure, over "
            "the seeds that all methods of the paper's table have here. p is of each alone, and takes all averages as exact.", "",
            *tables.grid(["", "theirs", "ours", "tau", "without their best and worst"], taus), "",
            "Ranks, 1 is best:", "", *tables.grid(["", "method", *heads], places), ""]  # fmt: skip


def best_trials(rates: list[dict]) -> dict[str, dict]:
    """By method the trial with the lowest CE, the first of equal ones; none for a method whose trials all stopped."""
    best: dict[str, dict] = {}
    for x in sorted((x for x in rates if x["val_ce"] is not None), key=lambda x: x["val_ce"]):
        best.setdefault(x["method"], x)
    return best


def trials(results: Path, settings: dict, chosen: dict[str, dict]) -> list[str]:
    """The table of trials: a line for each method and setting beside the rate, a column for each rate; the best is bold."""
    rates, rows, tried = read_lines(results / "rates.jsonl"), {}, {}
    if not rates:
        return ["No table of trials, as none or not all are on record; the table of costs has rates and settings.", ""]
    best = best_trials(rates)
    for x in rates:
        tried.setdefault(x["method"], []).append(x["lr"])
        name = x["method"] + "".join(f" {k}={v}" for k, v in x["settings"].items() if k != "lr")
        text = "stopped" if x["val_ce"] is None else f"{x['val_ce']:.4f}"
        rows.setdefault(name, {})[x["lr"]] = f"**{text}**" if x is best.get(x["method"]) else text
    every = sorted({lr for lrs in tried.values() for lr in lrs})
    longer = " (more at equal FLOPs)" if any(m.endswith("@flops") for m in tried) else ""
    but = f", save for {', '.join(chosen)}: the config gives their settings (`chosen`)" if chosen else ""
    at_end = [m for m, lrs in tried.items() if m in best and best[m]["lr"] in (min(lrs), max(lrs))]
    return ["## Trials", "",
            f"Each method had {' to '.join(map(str, sorted({*map(len, tried.values())})))} trials of {settings['trial_steps']:,} updates{longer} with seed 0. CE in nats per "
            f"token over the first {settings['skip_rows']} held-out rows, which are not scored; the lowest chooses{but}.", "",
            *tables.grid(["", *(f"{lr:g}" for lr in every)],
                         [[name, *(cells.get(lr, "–") for lr in every)] for name, cells in rows.items()]), "",
            f"Best at the lowest or highest rate tried, so that one beyond might do better: {', '.join(at_end) or 'none'}.", ""]  # fmt: skip


def draw_figures(logs: dict[int, dict[str, Path]], results: Path) -> list[str]:
    """Draw what plot.py draws from logs, the curves over all seeds -> names of the figures."""
    from tools import plot  # matplotlib only where something is drawn

    if not logs:
        return []
    seeds = [plot.read_curves(of_seed) for of_seed in logs.values()]  # the table of costs has them
    plot.curves(plot.over_seeds(seeds), results / "curves.png")
    return ["curves", *plot.draw_logs(("budget", "anchoring"), logs[min(logs)], results)]
