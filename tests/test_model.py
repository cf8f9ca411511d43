"""The decoder against transformers, weights in and out, students from a seed, and refusals."""

import dataclasses
import functools
import importlib
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import safetensors.torch
import tokenizers
import torch
import torch._dynamo.testing
import transformers
from torch._inductor.codegen.cpp import CppScheduling
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer

import lib.torch_setup
import model as model_py
from lib.files import read_json, write_json
from lib.head import OutputHead
from lib.hf import find_folder, load_tokenizer, pinned, tokenizer_hash, weights_hash
from model import PRESETS, Qwen2, Qwen2Config, init_student, load_config
from run.teacher import compile_layers
from tests import world
from tests.test_losses import assert_near
from tests.world import DEMO, ROOT, SHARED, refusal
from tools import bench

STORIES = SHARED / "data/stories260k"
QWEN = SHARED / "data/qwen1.5-1.8b"
needs_shared = pytest.mark.skipif(not STORIES.is_dir(), reason="no real weights on this machine")

SMALL = Qwen2Config(24, 37, 3, 4, 4, vocab_size=101, rope_theta=1e4)


@pytest.fixture(autouse=True)
def edits():
    """Edits of classes in this process are seen."""
    model_py.small_logits.cache_clear()
    yield
    model_py.small_logits.cache_clear()


def random_model(config):
    """Every tensor random and large enough to matter, biases and norms too."""
    torch.manual_seed(0)
    model = Qwen2(config)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.3)
            if p.ndim == 1:
                p.add_(1.0)
    return model


@pytest.fixture
def folder(tmp_path):
    random_model(SMALL).save_pretrained(tmp_path / "m")
    return tmp_path / "m"


def load(folder):
    return Qwen2.from_pretrained(str(folder))


def test_sharded_checkpoints_are_read(folder, tmp_path):
    sharded = tmp_path / "s"
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(sharded, max_shard_size="10KB")
    assert len([*sharded.glob("*.safetensors")]) > 2
    assert weights_hash(load(sharded)) == weights_hash(load(folder))


@pytest.mark.parametrize(
    ("name", "n"), [("200m", 203_437_824), ("500m", 463_987_712), ("1.8b", 1_836_828_672)]
)
def test_presets_have_the_papers_parameter_counts(name, n):
    with torch.device("meta"):
        assert world.n_params(Qwen2(PRESETS[name])) == n


@needs_shared
def test_the_teachers_preset_is_the_teachers_config():
    assert load_config(f"{QWEN}/config.json") == PRESETS["1.8b"]


def test_students_come_from_the_seed_alone():
    torch.manual_seed(99)
    demo = init_student("demo", seed=1234)
    # A change of torch or of the drawing order would silently change every student. A processor
    # without AVX2 draws other last bits.
    assert demo(torch.arange(5)[None])[0, -1, 2].item() == pytest.approx(0.48986, rel=1e-4)
    assert weights_hash(demo) != weights_hash(init_student("demo", seed=5))


def test_a_decoder_saved_without_its_head_is_read_if_the_head_is_tied(folder):
    AutoModelForCausalLM.from_pretrained(folder).model.save_pretrained(folder)
    assert "layers.0.mlp.up_proj.weight" in safetensors.torch.load_file(
        folder / "model.safetensors"
    )
    assert weights_hash(load(folder)) == weights_hash(random_model(SMALL))


def test_a_second_head_is_read_where_it_changes_nothing(folder):
    file = folder / "model.safetensors"
    world.tensor(file, "lm_head.weight", 't["model.embed_tokens.weight"].clone()')
    load(folder)


OTHERS = """
model_type="gpt2" => model_type='gpt2', expected one of qwen2, qwen3, llama, mistral
rope_scaling={"type": "linear", "factor": 2.0} => rope scaling
hidden_act="gelu" => hidden_act='gelu', expected 'silu'
use_sliding_window=true => use_sliding_window=True
model_type="llama" => model.layers.0.self_attn.k_proj.bias
hidden_size=null => hidden_size
layer_types=["sliding_attention", "full_attention", "full_attention"] => layer_types=
rope_scaling={"full_attention": {"rope_type": "default"}} => rope scaling
logit_scale=0.5 => logit_scale=0.5, expected None
num_hidden_layers=1000000 => num_hidden_layers=1000000: expected int 0 to 1,000
"""


@pytest.mark.parametrize(("change", "message"), world.read_table(OTHERS))
def test_other_architectures_are_refused_by_name(folder, change, message):
    world.edit(folder / "config.json", change)
    with refusal(re.escape(message)):
        load(folder)


def test_a_run_uses_one_commit_of_the_hub_and_names_it(monkeypatch, folder, tmp_path):
    """From the hub's own cache, without a network."""
    commit = "c0ffee" + 34 * "0"
    cache = tmp_path / "models--owner--model"
    shutil.copytree(folder, cache / "snapshots" / commit)
    (cache / "refs").mkdir()
    (cache / "refs/main").write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert load("owner/model").config == SMALL
    (cache / "refs/main").write_text("a later one")
    for name in ("owner/model", f"owner/model@{commit}"):
        assert pinned(name) == f"owner/model@{commit}"
    assert pinned(str(folder)) == str(folder)
    for name in ("owner/gone", "owner/model@other"):
        with refusal(f"{name}: no such local folder, and the hub refused it"):
            find_folder(name)


@pytest.mark.parametrize(("step", "found"), [(4, "checkpoints/step_00000008/model"), (8, "model")])
def test_of_a_student_that_is_trained_further_the_newest_checkpoint_counts(step, found, tmp_path):
    for model in ("model", *(f"checkpoints/step_{i:08d}/model" for i in (4, 8))):
        (tmp_path / model).mkdir(parents=True)
        write_json(tmp_path / model / "config.json", {})
    write_json(tmp_path / "run.json", {"step": step})
    (tmp_path / "checkpoints/step_00000009.bak/model").mkdir(parents=True)
    assert find_folder(str(tmp_path)) == tmp_path / found


# ----------------------------------------------------------------------------------------------
# tokenizers

NASTY = (
    'def f(x):\n\treturn x["k"]  # naïve\r\n\n\n    if x != 3.14159 and 2026 >= 1_000_000:\n'
    "        pass\nIt's we'LL they've; 你好。世界 नमस्ते 🙂🙃 e\u0301 é \u00a0\u3000 ½ Ⅷ İ  "
    "<|endoftext|> <s>x</s> <|im_start|>user<|im_end|> <unk>\x00\ufffd\n leading, trailing   \t \n"
)


def with_qwens_splits(nfc=False, bos=None):
    split = transformers.Qwen2Tokenizer().backend_tokenizer.pre_tokenizer
    tokenizer = world.make_tokenizer([NASTY], 300, bos=bos, split=split)
    if nfc:
        tokenizer.backend_tokenizer.normalizer = tokenizers.normalizers.NFC()
    return tokenizer


# tokenizer, and the kind of model that its folder must name
TOKENIZERS = {
    "demo": (lambda: load_tokenizer(DEMO), "llama"),
    "stories260k": (lambda: load_tokenizer(str(STORIES)), "llama"),
    "without NFC": (with_qwens_splits, "llama"),
    "as Qwen's": (lambda: with_qwens_splits(nfc=True), "qwen2"),
    "with BOS": (lambda: with_qwens_splits(bos="<s>"), "llama"),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_transformers_reads_a_saved_student_to_the_same_ids_and_logits(name, tmp_path):
    if name == "stories260k" and not STORIES.is_dir():
        pytest.skip("no real tokenizers on this machine")
    make, kind = TOKENIZERS[name]
    tokenizer = make()
    size = max(tokenizer.get_vocab().values()) + 3
    model = random_model(Qwen2Config(12, 17, 2, 3, 1, vocab_size=size))
    model.save_pretrained(tmp_path, tokenizer)
    ours = assert_read_as_ours(tmp_path)
    assert tokenizer_hash(ours) == tokenizer_hash(tokenizer)
    assert ours(NASTY).input_ids == tokenizer(NASTY).input_ids
    assert weights_hash(load(tmp_path)) == weights_hash(model)
    config = read_json(tmp_path / "config.json")
    assert config["model_type"] == kind
    kept = read_json(tmp_path / "tokenizer_config.json")  # no more than transformers 4 knows
    assert kept.pop("tokenizer_class") == "PreTrainedTokenizerFast"
    assert not kept.pop("clean_up_tokenization_spaces")
    assert kept.pop("model_input_names") == ["input_ids", "attention_mask"]
    assert {"eos_token", "bos_token"} <= set(kept)  # config.json has its id; CTranslate2 reads both
    assert set(kept) <= {"eos_token", "bos_token", "unk_token", "pad_token"}
    assert config["eos_token_id"] == tokenizer.eos_token_id
    bos = tokenizer.bos_token_id
    assert config["bos_token_id"] == (tokenizer.eos_token_id if bos is None else bos)


def assert_read_as_ours(folder):
    """Compare what transformers' own classes make of a folder with what ours make of it.

    -> our tokenizer
    """
    ours = load_tokenizer(str(folder))
    theirs = AutoTokenizer.from_pretrained(folder)
    for special in (True, False):
        x = ours(NASTY, add_special_tokens=special).input_ids
        assert theirs(NASTY, add_special_tokens=special).input_ids == x
        assert theirs.decode(x) == ours.decode(x)
    model, loaded = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not loaded["missing_keys"]
    assert not loaded["unexpected_keys"]
    x = torch.tensor([x[:97]])
    assert_near(load(folder)(x), model(x).logits, 1e-5)
    return ours


def test_transformers_reads_the_demos_teacher_as_we_do():
    tokenizer = assert_read_as_ours(DEMO)
    assert weights_hash(load(DEMO)).startswith("4cd459404dc1152d")
    assert tokenizer_hash(tokenizer).startswith("dc8987dd48aca985")


def test_the_documented_lines_load_a_student(tmp_path, monkeypatch):
    text = (ROOT / "docs/data.md").read_text()
    lines = re.search(r"<!-- load -->\n```python\n(.*?)```", text, re.S).group(1)
    monkeypatch.chdir(tmp_path)
    student = init_student("demo")
    tokenizer = load_tokenizer(DEMO)
    student.save_pretrained("out/demo/alra/model", tokenizer)
    names = {}
    exec(lines, names)
    x = names["tokenizer"](NASTY, return_tensors="pt").input_ids
    assert x.tolist() == [tokenizer(NASTY).input_ids]
    assert_near(names["model"](x).logits, student(x), 1e-5)


# ----------------------------------------------------------------------------------------------
# memory and compilation


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs a peak of memory")
def test_loading_never_holds_the_file_and_the_weights_at_once(tmp_path):
    init_student(Qwen2Config(512, 4096, 4, 4, 4, vocab_size=1000)).save_pretrained(tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size / 2**20
    loaded = []
    _, peak = bench.measure(lambda: loaded.append(load(tmp_path)), torch.device("cpu"), 1)
    (model,) = loaded
    assert size > 100
    assert peak < 1.4 * size
    assert model.head.any()


@pytest.mark.filterwarnings("ignore")  # torch has some of its own
def test_layers_of_a_shape_are_compiled_once_and_equal_the_eager_ones(monkeypatch):
    """Traced alone: test_head.py has compiled kernels."""
    counter = torch._dynamo.testing.CompileCounter()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    shape = Qwen2Config(32, 48, 3, 2, 1, 50)
    eager = init_student(shape)
    compiled = init_student(shape)
    compile_layers(compiled)
    assert list(compiled.state_dict()) == list(eager.state_dict())
    x = torch.arange(24).view(2, 12)
    assert_close(compiled.hidden(x), eager.hidden(x))
    assert counter.frame_count == 1


def test_layers_are_compiled_by_the_mended_compiler(monkeypatch):
    """tests/test_head.py has the fault itself."""
    torchs = object()
    monkeypatch.setattr(CppScheduling, "try_loop_split", torchs)
    compile_layers(SimpleNamespace(layers=[]))
    assert CppScheduling.try_loop_split is not torchs


# --- documents that do not see each other


def test_each_document_of_a_row_has_the_logits_that_it_has_alone(monkeypatch):
    """Its positions are shifted. The end token belongs to the document that it ends."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # angles and norms too
    model = random_model(model_py.REFERENCE_SHAPE).double()
    row = torch.tensor([5, 3, 9, 0, 7, 0, 0, 4, 8, 8, 2, 6])
    rows = torch.stack((row, row.flip(0)))
    documents = [x.tensor_split(1 + x.eq(0).nonzero()[:, 0]) for x in rows]
    alone = [torch.cat([model(x[None])[0] for x in parts]) for parts in documents]
    across = model(rows)
    model.document_end = 0
    assert_close(model(rows), torch.stack(alone), rtol=0, atol=1e-12)
    assert (model(rows) - across).norm() > 0.1 * across.norm()
    h = model.hidden(rows, recompute=True)
    assert torch.equal(h, model.hidden(rows))
    h.sum().backward()


@pytest.mark.filterwarnings("ignore")  # torch has some of its own
def test_the_block_mask_of_a_gpu_is_the_mask_of_a_cpu(monkeypatch):
    """Layers are traced once for all batches. A CPU has this attention forward alone, in torch."""
    compiled = functools.partial(torch.compile, backend="eager")  # traced, without kernels
    idx = torch.arange(600).view(2, 300) ** 2 % 101  # three blocks
    idx[0, 140:] = 1
    model = random_model(dataclasses.replace(SMALL, num_key_value_heads=2))
    model.document_end = 0
    made = model_py.within_documents
    seen = []

    def on_gpu(idx, end):
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "is_cuda", property(lambda x: True))
            seen.append(made(idx, end))
        return seen[-1]

    with torch.no_grad():
        batches = idx, idx.flip(0)
        expected = [model.hidden(x) for x in batches]
        monkeypatch.setattr(model_py, "within_documents", on_gpu)
        monkeypatch.setattr(torch, "compile", compiled)
        for layer in model.layers:
            layer.compile(backend="eager", dynamic=False, fullgraph=True)
        counted = torch._dynamo.utils.counters["stats"]
        before = counted["unique_graphs"]
        for x, h in zip(batches, expected, strict=True):
            assert_near(model.hidden(x), h, 1e-5)
    assert counted["unique_graphs"] - before == 2  # a layer, and what makes the mask
    assert type(seen[1].keywords["block_mask"]) is BlockMask


# --- lib/torch_setup.py: vector functions are right from their first call on


def test_an_import_calls_every_function_that_torch_takes_from_mkl(monkeypatch):
    header = Path(torch.__file__).parent / "include/ATen/cpu/vml.h"
    names = re.findall(r"^IMPLEMENT_VML_MKL\((\w+),", header.read_text(), re.M)
    assert len(names) > 10
    calls = set()
    for name in names:
        monkeypatch.setattr(torch, name, lambda x, name=name: calls.add((name, x.dtype, len(x))))
    importlib.reload(lib.torch_setup)
    assert calls == {(name, x, 8) for name in names for x in (torch.float32, torch.float64)}


def test_fp32_products_and_convolutions_do_without_tf32_on_a_gpu():
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    importlib.reload(lib.torch_setup)
    assert not torch.backends.cuda.matmul.allow_tf32 and not torch.backends.cudnn.allow_tf32


def test_the_reference_logits_are_those_of_transformers(tmp_path):
    decoder = Qwen2(model_py.REFERENCE_SHAPE)
    weights = {}
    for name, p in decoder.state_dict().items():
        weights[name] = torch.arange(p.numel()).sin().view(p.shape)
    decoder.load_state_dict(weights)
    decoder.save_pretrained(tmp_path / "m")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    z = theirs(torch.arange(1024)[None] % 64).logits[0, -2:, 0]
    assert_close(z, torch.tensor(model_py.REFERENCE), rtol=1e-4, atol=0)


def gelu(self, x):
    return self.down_proj(F.gelu(self.gate_proj(x)) * self.up_proj(x))


def test_an_edited_student_is_refused_without_its_edit(tmp_path, monkeypatch):
    shape = Qwen2Config(16, 24, 2, 2, 1, vocab_size=61)
    with monkeypatch.context() as edit:
        edit.setattr(model_py.StudentMLP, "forward", gelu)
        init_student(shape).save_pretrained(tmp_path)
        bf16 = Qwen2.from_pretrained(tmp_path, torch.bfloat16)
        assert type(bf16) is model_py.StudentDecoder
    model_py.small_logits.cache_clear()
    for dtype in (torch.float32, torch.bfloat16):
        with refusal("restore the classes for students in model.py"):
            Qwen2.from_pretrained(tmp_path, dtype)
    monkeypatch.setattr(model_py.MLP, "forward", gelu)
    model_py.small_logits.cache_clear()
    with refusal("an edit changes teachers too; edit StudentAttention, StudentMLP, "):
        init_student(shape)


class Late(model_py.StudentAttention):
    """Another attention from the token 32 on."""

    def forward(self, x, cos, sin):
        y = super().forward(x, cos, sin)
        return torch.cat((y[:, :32], 2 * y[:, 32:]), 1)


def test_a_buffer_of_an_edited_student_has_its_values(monkeypatch):
    class Sloped(model_py.StudentAttention):
        def __init__(self, config):
            super().__init__(config)
            self.register_buffer("slope", torch.linspace(1, 2, 3))

    monkeypatch.setattr(model_py, "StudentAttention", Sloped)
    student = init_student(Qwen2Config(16, 24, 1, 2, 1, vocab_size=61))
    assert student.layers[0].self_attn.slope.tolist() == [1.0, 1.5, 2.0]


def test_a_student_that_has_diverged_is_not_taken_for_an_edited_one():
    model_py.check_probe([math.nan] * 18, [math.nan] * 18, "edited")


class Dropout(model_py.StudentMLP):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.5, self.training)


@pytest.mark.parametrize(("name", "edited"), [("Attention", Late), ("MLP", Dropout)])
def test_an_edit_counts_by_what_it_does_in_evaluation(name, edited, tmp_path, monkeypatch):
    monkeypatch.setattr(model_py, f"Student{name}", edited)
    student = init_student(Qwen2Config(16, 24, 2, 2, 1, vocab_size=61))
    student.save_pretrained(tmp_path / "m")
    ids = torch.arange(99)[None] % 61
    assert torch.equal(load(tmp_path / "m")(ids), student.eval()(ids))
    assert ("probe" in read_json(tmp_path / "m/config.json")) == (edited is Late)


class Experts(model_py.StudentMLP):
    def __init__(self, config):
        super().__init__(config)
        self.experts = torch.nn.Parameter(torch.empty(4, 16, 24))


def test_stacked_matrices_are_drawn_and_logits_may_be_capped(tmp_path, monkeypatch):
    """The head alone is edited: training and what is saved use it."""
    head = Qwen2.head.fget
    capped = property(lambda self: OutputHead(head(self), (16,), (0.1,)))
    monkeypatch.setattr(model_py.StudentDecoder, "head", capped)
    monkeypatch.setattr(model_py, "StudentMLP", Experts)
    student = init_student(Qwen2Config(16, 24, 1, 2, 1, vocab_size=61)).requires_grad_(False)
    assert student.layers[0].mlp.experts.std() == pytest.approx(model_py.INIT_STD, rel=0.05)
    student.save_pretrained(tmp_path / "m")
    ids = torch.arange(9)[None]
    expected = 0.1 * (student.hidden(ids) @ head(student).t() / 0.1).tanh()
    assert_close(load(tmp_path / "m")(ids), expected)
    monkeypatch.setattr(model_py.StudentDecoder, "head", property(head))
    model_py.small_logits.cache_clear()
    with refusal("restore the classes for students"):
        load(tmp_path / "m")
    monkeypatch.setattr(model_py.StudentDecoder, "forward", lambda self, idx: None)
    with refusal("training calls `hidden` and `head`, not `forward`"):
        init_student("mini")


@dataclasses.dataclass(frozen=True)
class WithRank(Qwen2Config):
    rank: int = 4


def test_a_field_of_ones_own_is_saved_and_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr(model_py, "Qwen2Config", WithRank)
    monkeypatch.setattr(model_py, "FIELDS", model_py.FIELDS | {"rank"})
    shape = WithRank(16, 24, 1, 2, 1, vocab_size=61, rank=2)
    init_student(shape).save_pretrained(tmp_path / "own")
    assert load_config(tmp_path / "own") == shape
    older = read_json(tmp_path / "own/config.json")
    del older["rank"]
    write_json(tmp_path / "own/config.json", older)
    assert load_config(tmp_path / "own").rank == 4


def test_a_saved_student_generates_and_a_batch_padded_on_the_left_equals_single_rows(tmp_path):
    shape = Qwen2Config(8, 16, 1, 2, 2, vocab_size=259)
    world.make_model(shape).save_pretrained(tmp_path, world.make_tokenizer())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.generation_config.pad_token_id == 0

    def generated(texts):
        inputs = tokenizer(texts, return_tensors="pt", padding=True)
        ids = model.generate(**inputs, do_sample=False, min_new_tokens=5, max_new_tokens=5)
        return ids[:, -5:].tolist()

    texts = ["a long one", "b"]
    assert generated(texts) == [*generated(texts[:1]), *generated(texts[1:])]
