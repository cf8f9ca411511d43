"""What a training step should take on a card, from counts of bytes, FLOPs and launches, and from the card's rates."""

from lib.device import PEAK_FLOPS
from model import PRESETS, flops_per_token

# Rates that a card reaches, estimates from data sheets, +-20 %: FLOP/s in bf16 of the teacher's products, of a student's
# layers and of the heads; bytes/s, 0.83 to 0.93 of the data sheet's.
CARDS = {
    "H200": {"1.8b": 655e12, "500m": 510e12, "200m": 400e12, "head": 610e12, "bytes": 4.0e12},
    "RTX 4090": {"1.8b": 144e12, "500m": 136e12, "200m": 133e12, "head": 143e12, "bytes": 0.94e12},
}
LAUNCH_SEC = 6e-6  # a host's time to launch a kernel from Python
COUNTS = {
    "loss_gb": 1.43,  # dense bytes of ALRA's compiled graph for one row of 512, read from Inductor's code for sm_90
    "loss_launches": 55,  # its launches
    "layer_launches": 54,  # of a student's compiled layer, forward and backward; eager 148
    "teacher_launches": 15,  # of a teacher's compiled layer; eager 41
    "head_passes": 3,  # fp32 passes over the head's gradient after its product; 0 where the product adds in place
}


def estimate(
    card: str, student: str, micro_batch: int, compile: bool, rows: int, n: int, **counts: float
) -> tuple[float, float, dict[str, float]]:  # fmt: skip
    """One update of rows * n tokens with the 1.8B teacher -> seconds, MFU, seconds by part, which add up; counts as in COUNTS.

    A launch that the host is late with makes the card wait, so that an update takes at least as long as all launches.
    """
    rate, s, t, c = CARDS[card], PRESETS[student], PRESETS["1.8b"], COUNTS | counts
    n_tokens, n_micro = rows * n, rows // micro_batch
    head_s, head_t = (shape.vocab_size * shape.hidden_size for shape in (s, t))
    n_params = flops_per_token(s, 0, trained=False) / 2  # tied head: as many weights as multiply
    flops_s, flops_t = flops_per_token(s, n, trained=True), flops_per_token(t, n, trained=False)
    moved = 0.27 if compile else 1.0  # what is left of the element-wise passes of a layer
    widths = {shape: shape.num_hidden_layers * shape.hidden_size * n_tokens * moved for shape in (s, t)}
    parts = {
        "teacher": (flops_t - 2 * head_t) * n_tokens / rate["1.8b"],
        "student": (flops_s - 6 * head_s) * n_tokens / rate[student],
        "heads": (2 * head_t + 6 * head_s) * n_tokens / rate["head"],
        "loss": rows * c["loss_gb"] * 1e9 * n / 512 / rate["bytes"],
        "small kernels": rows * c["loss_launches"] * 5e-6,  # of the objective, seconds each
        "head's gradient": rows * c["head_passes"] * 4 * head_s / rate["bytes"],
        "element-wise": (650 * widths[s] + 150 * widths[t]) / rate["bytes"],  # bytes per token, layer and unit of width
        "casts": (17 * n_micro + 14 * (n_micro - 1)) * n_params / rate["bytes"],  # of weights; sums of their gradients
        "AdamW": 40 * n_params / rate["bytes"],  # read and write weights, moments, gradients; the clip
    }
    a_layer, a_teacher = (c["layer_launches"], c["teacher_launches"]) if compile else (148, 41)
    launches = n_micro * (a_layer * s.num_hidden_layers + a_teacher * t.num_hidden_layers)
    launches += rows * c["loss_launches"]
    parts["waiting for launches"] = max(launches * LAUNCH_SEC - sum(parts.values()), 0.0)
    sec = sum(parts.values())
    return sec, (flops_s + flops_t) * n_tokens / sec / PEAK_FLOPS[card], parts
