"""Whether transformers computes a saved model as model.py does."""

import torch
import transformers

from lib.errors import first_line
from model import Qwen2
from run.teacher import load_model


@torch.no_grad()
def differs_in_transformers(folder) -> str | None:
    """Return how transformers' logits of a saved model differ beyond rounding, or its error."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        model = load_model(f"{folder}")
        if not isinstance(model, Qwen2):
            return None  # it is transformers' own
        ids = torch.arange(16)[None] % model.config.vocab_size
        z = model(ids)
        saved = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        error = (saved(ids).logits - z).norm() / z.norm()
    except Exception as problem:  # whatever it is, training has ended well
        return first_line(problem)
    return None if error < 1e-4 else f"its logits differ by {error:.2%}"
