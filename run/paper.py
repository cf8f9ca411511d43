"""The paper's numbers: its tables, and the names and order of their rows."""

from lib.tasks import COLUMNS, SUITES

# The main table: accuracy in %, its average over the tasks, and the gain over pretrain.
_MAIN = """\
size  method     ARC-C ARC-E    HS  LAMB  OBQA  PIQA  SIQA  SC16    WG   avg  gain
200m  pretrain   21.84 32.45 26.46 12.92 23.80 55.28 34.03 51.50 50.51 34.31     -
200m  vanilla_kd 21.50 32.91 27.25 16.69 24.40 56.37 35.21 52.50 49.33 35.13  0.82
200m  pd         19.88 33.80 26.09 21.06 26.00 56.64 34.85 52.10 49.96 35.60  1.29
200m  atkd       23.46 34.81 27.36 15.97 24.20 58.11 34.85 52.00 48.78 35.50  1.19
200m  rld        22.10 35.06 27.73 12.75 26.00 57.34 34.19 52.30 51.78 35.47  1.16
200m  ldrld      20.65 34.30 27.24 14.30 26.80 57.24 34.95 53.10 49.17 35.31  0.99
200m  tad        21.67 36.45 27.37 13.00 23.20 58.76 35.41 53.60 51.62 35.68  1.36
200m  bild       25.60 26.60 27.43 13.02 29.40 53.05 33.11 45.20 49.80 33.69 -0.62
200m  alra       21.33 37.71 28.09 19.91 24.20 58.65 35.41 52.40 51.85 36.62  2.31
500m  pretrain   21.16 32.53 26.74 10.85 25.20 55.50 34.60 51.60 52.17 34.48     -
500m  vanilla_kd 20.90 35.23 27.26 15.78 23.40 57.34 35.16 52.00 49.01 35.12  0.64
500m  pd         21.84 34.30 26.46 19.10 26.00 58.27 35.01 51.60 50.59 35.91  1.42
500m  atkd       22.10 37.79 27.93 17.99 24.60 58.65 35.88 53.40 50.83 36.57  2.09
500m  rld        21.50 35.31 27.65 13.24 26.20 58.49 34.75 52.90 53.35 35.93  1.45
500m  ldrld      21.33 35.65 28.16 18.59 25.80 59.41 35.93 52.80 51.14 36.54  2.05
500m  tad        22.35 37.96 27.65 13.60 24.60 57.83 35.41 53.40 51.30 36.01  1.53
500m  bild       25.85 26.77 27.67 13.89 29.20 54.08 33.27 45.10 49.96 33.98 -0.51
500m  alra       22.61 38.26 28.34 20.59 26.40 58.60 35.41 53.80 52.57 37.40  2.91
"""
# The other tables give averages alone, at 200M and 500M; gains are over the first row.
_AVERAGES = {
    ("Pairwise weighting", "heldout"): """\
alra_r     34.91 35.77
alra_u     36.56 37.09
alra       36.62 37.40
""",
    ("Local budget", "validation"): """\
fixed_3    37.91 39.27
fixed_7    38.54 39.43
fixed_9    38.99 40.67
fixed_15   39.39 40.67
fixed_19   39.07 40.73
fixed_25   39.20 40.69
alra       39.89 41.09
""",
    ("Anchoring", "validation"): """\
alra_n     38.86 40.07
alra_ng    38.87 40.74
alra       39.89 41.09
alra_g     39.21 40.52
""",
}
UPDATES = {"heldout": 126_400, "validation": 67_200}  # behind the paper's numbers
NAMES = {
    "pretrain": "Pre-Train w/o KD",
    "vanilla_kd": "Vanilla KD",
    "pd": "PD",
    "atkd": "ATKD",
    "rld": "RLD",
    "ldrld": "LDRLD",
    "tad": "TAD",
    "bild": "BiLD",
    "alra": "ALRA",
    "alra_r": "ALRA-R",
    "alra_u": "ALRA-U",
    "alra_n": "ALRA-N",
    "alra_ng": "ALRA-NG",
    "alra_g": "ALRA-G",
}
NAMES |= {f"fixed_{d}": f"Fixed-Budget d={d}" for d in (3, 7, 9, 15, 19, 25)}

# (student, split, method) -> {task, "avg" or "gain": %}
PAPER = {}
_ROWS = [row.split() for row in _MAIN.splitlines()[1:]]
for size, method, *values in _ROWS:
    numbers = dict(zip([*COLUMNS, "avg", "gain"], values, strict=True))
    PAPER[size, "heldout", method] = {t: float(x) for t, x in numbers.items() if x != "-"}
# The tables: title, split, methods. Gains are measured from the first method.
LAYOUT = [("Main results", "heldout", tuple(dict.fromkeys(row[1] for row in _ROWS)))]
for (title, split), rows in _AVERAGES.items():
    methods = []
    for row in rows.splitlines():
        method, *averages = row.split()
        methods.append(method)
        for size, average in zip(("200m", "500m"), averages, strict=True):
            # ALRA's row of the main table stays, which has more than an average
            PAPER.setdefault((size, split, method), {"avg": float(average)})
    LAYOUT.append((title, split, tuple(methods)))


def paper_row(student: str | None, split, method: str, base: str, tasks: list[str]) -> list[str]:
    """Return the paper's cells of a method: tasks, average, gain over `base`; [] if it has none."""
    numbers = paper_numbers(student, split, method, tasks)
    reference = paper_numbers(student, split, base, tasks)
    if not numbers:
        return []
    cells = [f"{numbers[key]:.2f}" if key in numbers else "–" for key in (*tasks, "avg")]
    gain = "–"
    if method == base:
        gain = "Ref."
    elif base == "pretrain" and "gain" in numbers:
        gain = f"{numbers['gain']:+.2f}"  # as the paper prints it
    elif reference:
        gain = f"{numbers['avg'] - reference['avg']:+.2f}"
    return [*cells, gain]


def paper_numbers(student: str | None, split, method: str, tasks: list[str]) -> dict:
    """Return the paper's numbers. With some of the tasks, the average is over these."""
    numbers = PAPER.get((student, split, method), {})
    if tasks == SUITES[split]:
        return numbers
    numbers = {t: numbers[t] for t in tasks if t in numbers}
    if numbers:
        numbers["avg"] = sum(numbers.values()) / len(tasks)
    return numbers
