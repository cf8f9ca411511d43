"""The decoder against transformers, weights in and out, students from a seed, and every refusal."""

import json
import re
import shutil
from pathlib import Path

import huggingface_hub.constants
import huggingface_hub.errors
import pytest
import safetensors.torch
import tokenizers
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from lib.errors import UserError
from lib.hf import find_folder, load_tokenizer, pinned, tokenizer_hash, weights_hash
from lib.tokens import leading_bos
from model import PRESETS, Qwen2, Qwen2Config, init_student, load_config, rotary
from tests import world
from tests.world import DEMO, ROOT, SHARED
from tools import bench, sample

STORIES = SHARED / "data" / "stories260k"
needs_shared = pytest.mark.skipif(not STORIES.is_dir(), reason="the real weights are not on this machine")

SMALL = Qwen2Config(24, 37, 3, 4, 4, vocab_size=101, rope_theta=1e4)
KINDS = {
    "tied": SMALL,
    "untied": Qwen2Config(24, 37, 2, 4, 4, vocab_size=101, tie_word_embeddings=False),
    "grouped_heads": Qwen2Config(24, 41, 2, 6, 2, vocab_size=103, rope_theta=5e5),
    "one_kv_head": Qwen2Config(20, 31, 1, 5, 1, vocab_size=97, rms_norm_eps=1e-5),
    "wide_heads": Qwen2Config(24, 37, 2, 3, 3, vocab_size=101, head_dim=16),
}


def random_model(config: Qwen2Config, seed: int = 0) -> Qwen2:
    """Every tensor random and large enough to matter, biases and norms too."""
    torch.manual_seed(seed)
    model = Qwen2(config)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.3).add_(1.0 if p.ndim == 1 else 0.0)
    return model


def ids(config: Qwen2Config, b: int = 3, t: int = 29) -> torch.Tensor:
    return torch.randint(0, config.vocab_size, (b, t), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_transformers_after_a_round_trip(kind, tmp_path):
    model = random_model(KINDS[kind])
    model.save_pretrained(tmp_path / "m")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "m", attn_implementation="eager")
    ours = Qwen2.from_pretrained(str(tmp_path / "m"))
    x = ids(model.config)
    assert ours.config == model.config and weights_hash(ours) == weights_hash(model)
    torch.testing.assert_close(ours(x), theirs(x).logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model(x), ours(x), rtol=0, atol=0)


def test_sharded_checkpoints_are_read_and_a_tensor_in_two_files_is_refused(folder, tmp_path):
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "s", max_shard_size="10KB")
    files = sorted((tmp_path / "s").glob("*.safetensors"))
    assert len(files) > 2
    assert weights_hash(Qwen2.from_pretrained(str(tmp_path / "s"))) == weights_hash(Qwen2.from_pretrained(str(folder)))
    both = safetensors.torch.load_file(files[0]) | safetensors.torch.load_file(files[-1])
    safetensors.torch.save_file(both, files[-1], {"format": "pt"})
    refuse(tmp_path / "s", "expected no such tensor, or no second one")


def test_a_folder_with_a_presets_name_has_its_own_shape(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for model in (random_model(SMALL), init_student(SMALL, seed=5)):  # the second over the first
        model.save_pretrained("mini")
        assert weights_hash(Qwen2.from_pretrained("mini")) == weights_hash(model)
    assert Qwen2.from_pretrained("mini").config == SMALL != PRESETS["mini"]
    assert [path.name for path in tmp_path.iterdir()] == ["mini"]


@needs_shared
def test_real_weights_give_transformers_logits_and_sensible_text():
    model = Qwen2.from_pretrained(str(STORIES))
    theirs = AutoModelForCausalLM.from_pretrained(STORIES)
    tokenizer = load_tokenizer(str(STORIES))
    text = (STORIES / "sample.txt").read_text().strip().split("\n\n")[0]
    x = torch.tensor([[tokenizer.eos_token_id, *tokenizer.encode(text, add_special_tokens=False)]])[:, :400]
    z = model(x)
    torch.testing.assert_close(z, theirs(x).logits, rtol=1e-4, atol=1e-4)
    ce = torch.nn.functional.cross_entropy(z[0, :-1], x[0, 1:]).item()
    assert 1.0 < ce < 2.0, ce  # about 1.27 nats per token over many stories; 6.2 for a guess


def test_presets_have_the_papers_parameter_counts():
    with torch.device("meta"):
        counts = [Qwen2(PRESETS[name]).n_params for name in ("200m", "500m", "1.8b")]
    assert counts == [203_437_824, 463_987_712, 1_836_828_672]


@needs_shared
def test_the_teachers_preset_is_the_teachers_config():
    assert load_config(str(SHARED / "data" / "qwen1.5-1.8b" / "config.json")) == PRESETS["1.8b"]


def test_students_come_from_the_seed_alone():
    torch.manual_seed(99)
    a = init_student(SMALL, seed=1234)
    torch.rand(7)
    assert weights_hash(a) == weights_hash(init_student(SMALL, seed=1234)) != weights_hash(init_student(SMALL, seed=5))
    assert all((p == (0.0 if name.endswith("bias") else 1.0)).all() for name, p in a.named_parameters() if p.ndim == 1)
    demo = init_student("demo", seed=1234)
    weights = torch.cat([p.flatten() for p in demo.parameters() if p.ndim == 2])
    assert abs(weights.std() - 0.02) < 1e-4 and abs(weights.mean()) < 1e-4
    # A change of torch or of the drawing order would silently change every student.
    assert weights_hash(demo)[:16] == "398701d126de2c6d"


@pytest.fixture
def folder(tmp_path):
    random_model(SMALL).save_pretrained(tmp_path / "m")
    return tmp_path / "m"


def weights(folder: Path, edit) -> None:
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    edit(tensors)
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def refuse(folder: Path, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        Qwen2.from_pretrained(str(folder))


def test_a_second_head_and_a_bias_of_the_output_are_read_only_where_they_change_nothing(folder, tmp_path):
    weights(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    Qwen2.from_pretrained(str(folder))
    weights(folder, lambda t: t.update({"lm_head.weight": t["lm_head.weight"] + 1}))
    refuse(folder, "lm_head.weight differs from the embedding")
    init_student(SMALL).save_pretrained(tmp_path / "b", with_qwens_splits())
    name = "model.layers.1.self_attn.o_proj.bias"  # a llama has it
    weights(tmp_path / "b", lambda t: t[name].__setitem__(5, 1e-3))
    refuse(tmp_path / "b", f"{name} is not zero")


@pytest.mark.parametrize(("keys", "message"), [
    ({"model_type": "gpt2"}, "model_type='gpt2', expected one of qwen2, qwen3, llama, mistral"), ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope scaling"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope scaling"), ({"hidden_act": "gelu"}, "hidden_act='gelu', expected 'silu'"),
    ({"use_sliding_window": True}, "use_sliding_window=True"),
    ({"model_type": "llama"}, "model.layers.0.self_attn.k_proj.bias"), ({"hidden_size": None}, "hidden_size"),
])  # fmt: skip
def test_other_architectures_are_refused_by_name(folder, keys, message):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    refuse(folder, message)


def test_the_hub_is_asked_for_weights_and_tokenizer_and_its_refusal_is_one_line(monkeypatch, folder):
    asked = []

    def snapshot_download(name, allow_patterns, **keys):
        if name == "owner/gone":
            raise huggingface_hub.errors.LocalEntryNotFoundError("offline")
        asked.append((name, *keys.values()))
        assert "*.safetensors" in allow_patterns and not any(".bin" in p for p in allow_patterns)
        return folder

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert Qwen2.from_pretrained("owner/name").config == SMALL
    find_folder("EleutherAI/pythia-410m@step1000")
    find_folder("owner/name")
    find_folder("owner/name@refs/pr/1")
    assert asked[0] == ("owner/name", None) and asked.count(asked[0]) == 1  # so one commit for a whole run
    assert asked[-2:] == [("EleutherAI/pythia-410m", "step1000"), ("owner/name", "refs/pr/1")]
    with pytest.raises(UserError, match=r"owner/gone: no such local folder, and the hub refused it \(offline\)"):
        find_folder("owner/gone")


def test_a_run_names_the_commit_of_the_hub_that_it_uses(monkeypatch, folder, tmp_path):
    at = tmp_path / "models--owner--name"  # the hub's own layout, without a network
    shutil.copytree(folder, at / "snapshots" / ("c0ffee" + 34 * "0"))
    (at / "refs").mkdir()
    (at / "refs" / "main").write_text("c0ffee" + 34 * "0")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for name in ("owner/name", "owner/name@main", f"owner/name@c0ffee{34 * '0'}"):
        assert pinned(name) == f"owner/name@c0ffee{34 * '0'}"
    assert pinned(str(folder)) == str(folder)
    assert Qwen2.from_pretrained("owner/name").config == SMALL


NASTY = """def f(x):\n\treturn x["k"]  # naïve\r\n\n\n    if x != 3.14159 and 2026 >= 1_000_000:\n        pass
It's we'LL they've; 你好。世界 नमस्ते 🙂🙃 e\u0301 é \u00a0\u3000 ½ Ⅷ İ  <|endoftext|> <s>x</s> <|im_start|>user<|im_end|> <unk>\x00\ufffd
 leading, trailing   \t \n"""


def with_qwens_splits(nfc: bool = False, bos: str | None = None) -> PreTrainedTokenizerFast:
    split = json.loads(transformers.Qwen2Tokenizer().backend_tokenizer.to_str())["pre_tokenizer"]["pretokenizers"][0]
    parts = [tokenizers.pre_tokenizers.Split(tokenizers.Regex(split["pattern"]["Regex"]), "isolated"),
             tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]  # fmt: skip
    tokenizer = world.make_tokenizer([NASTY], 300, bos=bos, split=tokenizers.pre_tokenizers.Sequence(parts))
    if nfc:
        tokenizer.backend_tokenizer.normalizer = tokenizers.normalizers.NFC()
    return tokenizer


def word_pieces() -> PreTrainedTokenizerFast:
    vocab = {"[UNK]": 0, "<|endoftext|>": 1, "def": 2, "##x": 3, "it": 4}
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")


def qwens(n: int = 999) -> PreTrainedTokenizerFast:
    """Qwen's own tokenizer with `n` of its tokens, since transformers parses 151,646 in seconds, and several times."""
    facts = json.loads((SHARED / "data" / "qwen1.5-1.8b" / "tokenizer.json").read_text())
    vocab = {token: i for token, i in facts["model"]["vocab"].items() if i < n}
    merges = [pair for pair in facts["model"]["merges"] if "".join(pair).replace(" ", "") in vocab]
    facts["model"] |= {"vocab": vocab, "merges": merges}
    facts["added_tokens"] = [token | {"id": i} for i, token in enumerate(facts["added_tokens"], n)]
    backend = tokenizers.Tokenizer.from_str(json.dumps(facts))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")


@pytest.mark.parametrize(("make", "kind"), [  # a tokenizer and the kind of model that its folder must name
    pytest.param(lambda: load_tokenizer(DEMO), "llama", id="demo"), pytest.param(word_pieces, "llama", id="WordPiece"),
    pytest.param(lambda: load_tokenizer(str(STORIES)), "llama", id="stories260k", marks=needs_shared),
    pytest.param(qwens, "qwen2", id="qwen1.5", marks=needs_shared), pytest.param(with_qwens_splits, "llama", id="without NFC"),
    pytest.param(lambda: with_qwens_splits(nfc=True), "qwen2", id="as Qwen's"),
    pytest.param(lambda: with_qwens_splits(bos="<s>"), "llama", id="with BOS"),
])  # fmt: skip
def test_transformers_reads_a_saved_student_to_the_same_ids_and_logits(make, kind, tmp_path):
    tokenizer, folder = make(), str(tmp_path / "m")
    model = random_model(Qwen2Config(12, 17, 2, 3, 1, vocab_size=max(tokenizer.get_vocab().values()) + 3))
    model.save_pretrained(folder, tokenizer)
    ours = same_there(folder)
    assert tokenizer_hash(ours) == tokenizer_hash(tokenizer) and ours(NASTY).input_ids == tokenizer(NASTY).input_ids
    assert weights_hash(Qwen2.from_pretrained(folder)) == weights_hash(model)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    eos, bos = tokenizer.eos_token_id, tokenizer.bos_token_id
    assert [config[key] for key in ("model_type", "eos_token_id")] == [kind, eos]
    assert config["bos_token_id"] == (eos if bos is None else bos)


def same_there(folder: str) -> PreTrainedTokenizerFast:
    """What transformers' own classes make of a folder, against what ours make of it; -> our tokenizer."""
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    x = ours(NASTY).input_ids
    assert theirs(NASTY).input_ids == x and theirs.decode(x) == ours.decode(x)
    assert theirs(NASTY, add_special_tokens=False).input_ids == ours(NASTY, add_special_tokens=False).input_ids
    model, told = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"], told
    x = torch.tensor([x[:97]])
    torch.testing.assert_close(Qwen2.from_pretrained(folder)(x), model(x).logits, rtol=1e-5, atol=1e-5)
    return ours


@pytest.mark.parametrize(("run", "first"), [(None, "bos"), ({"bos": 256}, "bos"), ({"bos": None}, "eos")])
def test_a_sample_begins_as_the_documents_of_its_training_did(run, first, tmp_path, monkeypatch, capsys):
    tokenizer, prompts = with_qwens_splits(bos="<s>"), []
    ids = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id}
    init_student(Qwen2Config(12, 17, 1, 2, 1, vocab_size=307)).save_pretrained(tmp_path / "alra" / "model", tokenizer)
    if run is not None:
        run = {key: ids["bos"] for key in run if run[key]} or run
        (tmp_path / "alra" / "run.json").write_text(json.dumps(run))
    generate = lambda model, prompt, *_: prompts.append(prompt) or prompt  # noqa: E731
    monkeypatch.setattr(sample, "generate", generate)
    for name in ("alra", "alra/model", ""):  # the last is the run's folder, with one student
        sample.main([str(tmp_path / name), "--prompt", "if x"])
    assert prompts == [[ids[first], *tokenizer.encode("if x", add_special_tokens=False)]] * 3
    shutil.copytree(tmp_path / "alra", tmp_path / "pd")
    with pytest.raises(UserError, match=rf"has several students; choose one: {tmp_path / 'alra'}, {tmp_path / 'pd'}$"):
        sample.main([str(tmp_path)])
    assert capsys.readouterr().out == "if x\n" * 3 and leading_bos(tokenizer) == ids["bos"]


def test_transformers_reads_the_demos_teacher_as_we_do():
    same_there(DEMO)
    assert weights_hash(Qwen2.from_pretrained(DEMO)).startswith("4cd459404dc1152d")
    assert tokenizer_hash(load_tokenizer(DEMO)).startswith("dc8987dd48aca985")


def test_the_readmes_lines_load_a_student(tmp_path, monkeypatch):
    lines = re.search(r"<!-- load -->\n```python\n(.*?)```", (ROOT / "docs/data.md").read_text(), re.S).group(1)
    monkeypatch.chdir(tmp_path)
    student, names = init_student("demo"), {}
    student.save_pretrained("out/demo/alra/model", load_tokenizer(DEMO))
    exec(lines, names)
    x = names["tokenizer"](NASTY, return_tensors="pt").input_ids
    assert x.tolist()[0] == load_tokenizer(DEMO)(NASTY).input_ids
    torch.testing.assert_close(names["model"](x).logits, student(x), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no peak memory of a process is known here")
def test_loading_never_holds_the_file_and_the_weights_at_once(tmp_path):
    init_student(Qwen2Config(512, 4096, 4, 4, 4, vocab_size=1000)).save_pretrained(tmp_path / "m")
    size = (tmp_path / "m" / "model.safetensors").stat().st_size / 2**20
    before = bench.start_memory(torch.device("cpu"))
    model = Qwen2.from_pretrained(str(tmp_path / "m"))
    peak = bench.peak_memory(torch.device("cpu"), before)
    assert size > 100 and peak < 1.4 * size and model.head.any()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch has some of its own
def test_layers_of_a_shape_are_compiled_once_and_equal_the_eager_ones():
    shape = Qwen2Config(32, 48, 3, 2, 1, 50)
    eager, compiled = init_student(shape), init_student(shape)
    compiled.compile_layers()
    assert list(compiled.state_dict()) == list(eager.state_dict())
    x = torch.arange(24).view(2, 12)
    counted = torch._dynamo.utils.counters["stats"]
    before = counted["unique_graphs"]
    h, wanted = (m.hidden(x) for m in (compiled, eager))
    torch.testing.assert_close(h, wanted, rtol=1e-5, atol=1e-6)
    h.square().sum().backward()
    wanted.square().sum().backward()
    assert counted["unique_graphs"] - before == 1
    for p, q in zip(compiled.parameters(), eager.parameters(), strict=True):
        assert (p.grad - q.grad).norm() <= 1e-4 * q.grad.norm() + 1e-5  # a key's bias has no gradient but rounding


def test_products_that_are_made_as_one_equal_the_single_ones(monkeypatch):
    """In bfloat16 a compiled layer casts its weights, and multiplies q, k and v, gate and up, at once."""
    layer = init_student(Qwen2Config(32, 48, 1, 4, 2, 50)).model.layers[0]
    layer.self_attn.k_proj.bias.data.normal_()
    x = torch.randn(2, 12, 32).bfloat16()
    cos, sin = (t.bfloat16().unsqueeze(-3) for t in rotary(torch.arange(12), Qwen2Config(256, 704, 1, 4, 4, 100)))
    cos, sin = cos[..., :8], sin[..., :8]
    out, grads = [], []
    for compiling in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda on=compiling: on)
        layer.zero_grad()
        out.append(layer(x, cos, sin, None))
        out[-1].float().square().sum().backward()
        grads.append([p.grad.clone() for p in layer.parameters()])
    assert (out[0].float() - out[1].float()).norm() < 0.01 * out[0].float().norm()
    for a, b in zip(*grads, strict=True):
        assert (a - b).norm() < 0.03 * a.norm() + 1e-3
