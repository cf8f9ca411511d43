"""Teachers of any family: the native ones against transformers, the others through it, and every refusal."""

import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

import train
from lib.files import UserError
from lib.teacher import check_logits, for_students, load_teacher, teacher_size
from model import Qwen2, load_tokenizer, weights_hash
from tests.test_train import TOKENIZER, V, load, world  # noqa: F401  a fixture

CPU = torch.device("cpu")
SMALL = {"hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": V,
         "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3,
         "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}  # fmt: skip
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
        load_tokenizer(TOKENIZER).save_pretrained(tmp_path / "teacher")
        return str(tmp_path / "teacher")

    return make


def ids() -> torch.Tensor:
    return torch.randint(0, V, (3, 29), generator=torch.Generator().manual_seed(5))


def theirs(folder: str) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids()).logits


@pytest.mark.parametrize("kind", NATIVE)
def test_native_families_have_transformers_logits_before_and_after_saving(kind, make, tmp_path):
    folder = make(NATIVE[kind])
    if kind == "qwen3, biased":  # a bias on the attention's output is not computed here
        model = AutoModelForCausalLM.from_pretrained(folder)
        for layer in model.model.layers:
            layer.self_attn.o_proj.bias.data.zero_()
        model.save_pretrained(folder)
    ours = Qwen2.from_pretrained(folder)
    torch.testing.assert_close(ours(ids()), theirs(folder), rtol=1e-5, atol=1e-5)
    tokenizer = load_tokenizer(TOKENIZER)
    ours.save_pretrained(tmp_path / "again", tokenizer)
    torch.testing.assert_close(theirs(str(tmp_path / "again")), theirs(folder), rtol=1e-5, atol=1e-5)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
    assert again("def f(x):\n\treturn 12").input_ids == tokenizer("def f(x):\n\treturn 12").input_ids
    assert weights_hash(Qwen2.from_pretrained(str(tmp_path / "again"))) == weights_hash(ours)
    teacher = load_teacher(folder, torch.float32, CPU)
    assert teacher.native and json.loads(json.dumps(teacher.shape)) == teacher.shape


@pytest.mark.parametrize("kind", FOREIGN)
def test_other_families_hidden_states_times_head_are_their_logits(kind, make):
    folder = make(FOREIGN[kind])
    teacher = load_teacher(folder, torch.float32, CPU)
    assert teacher.native == (kind == "mistral with a window") or pytest.fail("computed by the wrong code")
    t = 8 if teacher.native else 29  # up to its window a Mistral is native
    torch.testing.assert_close(
        teacher.hidden(ids()[:, :t]) @ teacher.head.T, theirs(folder)[:, :t], rtol=1e-5, atol=1e-5
    )
    n = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(folder).parameters())
    assert teacher_size(folder).n_params == n and json.loads(json.dumps(teacher.shape)) == teacher.shape


@pytest.mark.parametrize("kind", [kind for kind in (*NATIVE, *FOREIGN) if kind != "qwen3, biased"])
def test_two_updates_of_alra_from_each_family(kind, make, world, tmp_path):  # noqa: F811
    folder = make({**NATIVE, **FOREIGN}[kind], max_position_embeddings=256, sliding_window=256)
    knobs = {"teacher": folder, "tokenizer": TOKENIZER, "student": "16x1x2", "methods": "alra", "max_steps": 2, "schedule_steps": 2,
             "warmup_steps": 1, "val_max_rows": 2, "data_dir": world / "data", "out_dir": tmp_path / "out"}  # fmt: skip
    assert train.run(load(world, tmp_path / "out", **knobs)) == 0
    log = [json.loads(line) for line in (tmp_path / "out/alra/log.jsonl").read_text().splitlines()]
    assert log[-1]["val_kl"] > 0 and log[-2]["kd"] > 0
    student = Qwen2.from_pretrained(str(tmp_path / "out/alra"))
    shape = for_students(folder)
    assert shape["vocab_size"] == V and {key: getattr(student.config, key) for key in shape} == shape


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
        monkeypatch.setattr("lib.teacher.BENT", {})
        with pytest.raises(UserError, match="its logits are not hidden states times head; take another teacher"):
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


def test_pickles_and_remote_code_are_never_opened(make, tmp_path):
    folder = Path(make(FOREIGN["pythia"]))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="is a pickle, which can run code"):
        load_teacher(str(folder), torch.float32, CPU)
    (folder / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}}))
    (folder / "mine.py").write_text("raise SystemExit('ran')")
    with pytest.raises(UserError, match="transformers does not know it"):
        load_teacher(str(folder), torch.float32, CPU)
