"""Teachers of any family: the native ones against transformers, the others through it, and every refusal."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

import configure
import prepare
import train
from lib.errors import UserError
from lib.hf import load_tokenizer, weights_hash
from model import PRESETS, Qwen2, Qwen2Config, init_student, load_config, student_config
from run.foreign import check_logits
from run.teacher import INHERITED, inherited, load_teacher
from tests.world import DEMO, V, config

CPU = torch.device("cpu")
SMALL = {"hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": V,
         "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3,
         "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}  # fmt: skip
ONE_LAYER = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip

NATIVE = {
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3, biased": (transformers.Qwen3Config, {"head_dim": 6, "attention_bias": True}),
    "llama 3": (transformers.LlamaConfig, {"rope_parameters": LLAMA3}),
    "smollm2": (transformers.LlamaConfig, {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "mistral": (transformers.MistralConfig, {"sliding_window": None, "head_dim": 8}),
}
FOREIGN = {
    "pythia": (transformers.GPTNeoXConfig, {"intermediate_size": 96}),
    "olmo 2": (transformers.Olmo2Config, {}),
    "smollm 3": (transformers.SmolLM3Config, {}),
    "gemma 3": (transformers.Gemma3TextConfig, {"head_dim": 8, "sliding_window": 8}),
    "phi 3": (transformers.Phi3Config, {}),
    "mixture of experts": (transformers.OlmoeConfig, {"num_experts": 4, "num_experts_per_tok": 2}),
    "mamba": (transformers.MambaConfig, {"state_size": 4}),
    "gpt 2": (transformers.GPT2Config, {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "mistral with a window": (transformers.MistralConfig, {"sliding_window": 8}),
}


@pytest.fixture
def make(tmp_path):
    """A random model of a family, in a folder with the demo's tokenizer -> the folder's name."""

    def make(kind, **keys) -> str:
        torch.manual_seed(3)
        cls, more = kind
        wanted = {"num_key_value_heads": 4} if cls is transformers.GPTNeoXConfig else {}
        model = AutoModelForCausalLM.from_config(cls(**{**SMALL, **wanted, **more, **keys}))
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p) * 0.2)  # norms and biases too
        model.save_pretrained(tmp_path / "teacher")
        load_tokenizer(DEMO).save_pretrained(tmp_path / "teacher")
        return str(tmp_path / "teacher")

    return make


def ids() -> torch.Tensor:
    return torch.randint(0, V, (3, 29), generator=torch.Generator().manual_seed(5))


def theirs(folder: str) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids()).logits


def edit_config(folder: str, **keys) -> None:
    file = Path(folder) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


@pytest.mark.parametrize("kind", NATIVE)
def test_native_families_have_transformers_logits_before_and_after_saving(kind, make, tmp_path):
    folder = make(NATIVE[kind])
    if kind == "qwen3, biased":  # a bias on the attention's output is not computed here
        model = AutoModelForCausalLM.from_pretrained(folder)
        for layer in model.model.layers:
            layer.self_attn.o_proj.bias.data.zero_()
        model.save_pretrained(folder)
    edit_config(folder, rope_theta=77.0)  # that of `rope_parameters` counts
    ours = Qwen2.from_pretrained(folder)
    torch.testing.assert_close(ours(ids()), theirs(folder), rtol=1e-5, atol=1e-5)
    tokenizer = load_tokenizer(DEMO)
    ours.save_pretrained(tmp_path / "again", tokenizer)
    torch.testing.assert_close(theirs(str(tmp_path / "again")), theirs(folder), rtol=1e-5, atol=1e-5)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
    assert again("def f(x):\n\treturn 12").input_ids == tokenizer("def f(x):\n\treturn 12").input_ids
    assert weights_hash(Qwen2.from_pretrained(str(tmp_path / "again"))) == weights_hash(ours)
    teacher = load_teacher(folder, torch.float32, CPU)
    assert teacher.native


@pytest.mark.parametrize("kind", FOREIGN)
def test_other_families_hidden_states_times_head_are_their_logits(kind, make):
    folder = make(FOREIGN[kind])
    teacher = load_teacher(folder, torch.float32, CPU)
    assert teacher.native == (kind == "mistral with a window") or pytest.fail("computed by the wrong code")
    t = 8 if teacher.native else 29  # up to its window a Mistral is native
    logits = teacher.hidden(ids()[:, :t]) @ teacher.head.T
    torch.testing.assert_close(logits, theirs(folder)[:, :t], rtol=1e-5, atol=1e-5)
    assert inherited(folder)["vocab_size"] == V and teacher.flops_per_token(13) > 2 * V * 24


def test_flops_of_a_mixture_count_its_active_experts_alone(make):
    teacher = load_teacher(make(FOREIGN["mixture of experts"]), torch.float32, CPU)
    per_expert = 3 * 24 * 36  # gate, up and down; two of four are active
    attention, router, norms = 2 * 24 * 24 + 2 * 24 * 12, 4 * 24, 24 + 12  # OLMoE has norms on q [24] and k [12]
    weights = 2 * (attention + router + norms + 2 * 24 + 2 * per_expert) + 24 + V * 24
    assert teacher.flops_per_token(13) == 2 * weights


def test_a_preset_takes_from_the_teacher_what_it_does_not_say(make):
    folder = make(NATIVE["llama 3"])
    shape = student_config("200m", inherited(folder))
    assert (shape.vocab_size, shape.rope_theta, shape.rms_norm_eps, shape.max_position_embeddings) == (V, 1e4, 1e-6, 64)
    assert shape.rope_scaling == {k: v for k, v in LLAMA3.items() if k != "rope_theta"}
    assert (shape.hidden_size, shape.attention_bias, shape.qk_norm) == (768, True, False)
    qwen = {key: getattr(PRESETS["1.8b"], key) for key in INHERITED}  # Qwen1.5-1.8B's
    assert all(student_config(name, qwen) == PRESETS[name] for name in ("200m", "500m", "1.8b"))
    demo = inherited(DEMO)
    assert all(student_config(name, demo) == PRESETS[name] for name in ("mini", "demo", "demo_teacher"))
    inline = student_config("512x8x4", qwen)
    assert inline == student_config('{"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 4}', qwen)
    assert (inline.intermediate_size, inline.num_key_value_heads, inline.vocab_size) == (1408, 4, 151_936)
    part = json.dumps(ONE_LAYER | {"intermediate_size": 9, "vocab_size": 7})
    assert student_config(part, qwen).vocab_size == 7 and student_config(part).intermediate_size == 9
    with pytest.raises(UserError, match="expected a vocab_size"):
        student_config("512x8x4")


def test_vocabularies_that_differ_in_padding_are_cut_to_the_smaller(make, tiny, tmp_path, capsys):
    """The same bits as from a teacher and a student without the padding."""
    shape, folder = Qwen2Config(16, 24, 1, 2, 2, vocab_size=V, max_position_embeddings=64), tmp_path / "s"
    knobs = {"methods": "alra", "max_steps": 2, "schedule_steps": 2, "warmup_steps": 1, "student": folder,
             "student_weights": folder}  # fmt: skip
    wide = make(NATIVE["mistral"], vocab_size=V + 5)
    seen = []
    for pad_t, pad_s in ((0, 0), (5, 0), (0, 7), (5, 7)):
        teacher = Qwen2.from_pretrained(wide)
        teacher.cut(V + pad_t)
        teacher.save_pretrained(tmp_path / "t", load_tokenizer(DEMO))
        student = init_student(dataclasses.replace(shape, vocab_size=V + 7))
        student.cut(V + pad_s)
        student.save_pretrained(folder)
        out = tmp_path / f"{pad_t}-{pad_s}"
        assert train.distil(config(tiny, out, teacher=tmp_path / "t", **knobs)) == 0
        told = f"vocabulary: {V + pad_t:,} of the teacher, {V + pad_s:,} of the student: cut to"
        assert (told in capsys.readouterr().out) == (pad_t != pad_s)
        seen.append(Qwen2.from_pretrained(str(out / "alra")))
    assert [m.config.vocab_size for m in seen] == [V, V, V, V + 5]
    assert len({weights_hash(m) for m in seen[:3]}) == 1


REFUSED = {
    "a head with a bias": (transformers.PhiConfig, {}, "its head has a bias"),
    "Gemma 2": (transformers.Gemma2Config, {"head_dim": 8}, "final_logit_softcapping=30.0"),
    "Cohere": (transformers.CohereConfig, {}, "logit_scale=0.0625"),
    "Granite": (transformers.GraniteConfig, {"logits_scaling": 8.0}, "logits_scaling=8.0"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_logits_that_are_more_than_hidden_states_times_head_are_refused_by_name(kind, make, monkeypatch):
    cls, keys, message = REFUSED[kind]
    folder = make((cls, keys))
    with pytest.raises(UserError, match=re.escape(message)):
        load_teacher(folder, torch.float32, CPU)
    if "bias" not in kind:  # a family that nobody has named is found out by its numbers
        monkeypatch.setattr("run.foreign.LOGIT_SCALES", {})
        with pytest.raises(UserError, match="its logits are not hidden states times head; choose another teacher"):
            load_teacher(folder, torch.float32, CPU)


def test_encoder_decoders_models_that_look_ahead_and_models_without_a_head_are_refused(make, tmp_path, monkeypatch):
    config = transformers.T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=V)
    config.save_pretrained(tmp_path / "t5")
    with pytest.raises(UserError, match="t5 is an encoder-decoder"):
        load_teacher(str(tmp_path / "t5"), torch.float32, CPU)
    folder = make(FOREIGN["olmo 2"])
    transformers.AutoModel.from_pretrained(folder).save_pretrained(folder)
    with pytest.raises(UserError, match=r"missing tensor lm_head\.weight"):
        load_teacher(folder, torch.float32, CPU)
    for keys, says in (
        ({"num_hidden_layers": 1}, r"config.json has no place for tensor model.layers.1\..* \(11 in all\)"),
        ({"num_hidden_layers": 10**6}, "config.json: num_hidden_layers=1000000, but its safetensors have 25 tensors"),
        ({"rope_parameters": 3}, "config.json: cannot be used"),
    ):
        folder = make(FOREIGN["olmo 2"])
        edit_config(folder, **keys)
        with pytest.raises(UserError, match=says):
            load_teacher(folder, torch.float32, CPU)
    folder = make(FOREIGN["gpt 2"])
    model = AutoModelForCausalLM.from_pretrained(folder)
    embed = model.transformer.forward
    sees_all = lambda idx, **k: ((h := embed(idx, **k)[0]) + h.sum(1, keepdim=True),)  # noqa: E731
    monkeypatch.setattr(model.transformer, "forward", sees_all)
    monkeypatch.setattr(type(model), "forward", lambda self, idx, **k: transformers.modeling_outputs.CausalLMOutput(
        logits=self.lm_head(self.transformer(idx)[0])))  # fmt: skip
    with pytest.raises(UserError, match="depend on later tokens"):
        check_logits("x", model)
    monkeypatch.setattr(type(model), "get_output_embeddings", lambda self: None)
    with pytest.raises(UserError, match="GPT2LMHeadModel has no output embedding"):
        check_logits("x", model)


def test_remote_code_is_never_run(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}}))
    (tmp_path / "mine.py").write_text("raise SystemExit('ran')")
    with pytest.raises(UserError, match="contains custom code"):
        load_teacher(str(tmp_path), torch.float32, CPU)


CONFIGS = {  # a small stand-in for each config's teacher, with the keys of its real config.json
    "qwen3_200m": (transformers.Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
                   "max_position_embeddings": 32_768, "max_window_layers": 28, "use_sliding_window": False, "attention_bias": False}),
    "pythia_160m": (transformers.GPTNeoXConfig, {"intermediate_size": 96, "rotary_pct": 0.25, "max_position_embeddings": 2048, "use_parallel_residual": True}),
    "smollm2_30m": (transformers.LlamaConfig, {"tie_word_embeddings": True, "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
                    "max_position_embeddings": 8192}),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_the_configs_of_other_teachers_train_ten_updates(name, make, tmp_path, capsys):
    teacher, text = make(CONFIGS[name]), tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"def f_{i}(x):\n    return x + {i}\n" * 9}) + "\n" for i in range(60)))
    flags = [f"--source={text}", f"--teacher={teacher}", f"--data_dir={tmp_path / 'data'}", f"--out_dir={tmp_path / 'out'}", "--source_config=None",
             "--train_rows=100", "--n_documents=None", "--val_rows=0", "--val_share=0.1", "--seq_len=16", "--max_steps=10", "--schedule_steps=10",
             "--warmup_steps=2", "--batch_rows=2", "--micro_batch=2", "--compile=False", "--shuffle=True"]  # fmt: skip
    prepare.prepare(configure.load([f"config/{name}.py", *flags]))
    real = configure.load([f"config/{name}.py"])
    tied = json.dumps(ONE_LAYER | {"tie_word_embeddings": "pythia" not in name})
    assert train.distil(configure.load([f"config/{name}.py", *flags, f"--student={tied}"])) == 0
    shape, given = load_config(str(tmp_path / "out/alra")), inherited(teacher)
    assert shape.tie_word_embeddings == student_config(real.student, given).tie_word_embeddings
    assert {key: getattr(shape, key) for key in given} == given
    assert given["rope_theta"] == {"pythia_160m": 1e4, "qwen3_200m": 1e6, "smollm2_30m": 1e5}[name]
    folder = str(tmp_path / "out/alra/model")
    torch.testing.assert_close(Qwen2.from_pretrained(folder)(ids()), theirs(folder), rtol=1e-5, atol=1e-5)


def test_what_a_config_json_leaves_out_is_the_familys_default(tmp_path):
    facts = ONE_LAYER | {"hidden_size": 128, "intermediate_size": 8, "vocab_size": 9}
    for kind, head_dim, context in (("qwen3", 128, 32_768), ("mistral", 64, 4096), ("llama", 64, 32_768)):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **facts}))
        shape = load_config(str(tmp_path / "config.json"))
        assert (shape.head_dim, shape.max_position_embeddings, shape.qk_norm) == (head_dim, context, kind == "qwen3")
        assert not shape.attention_bias
