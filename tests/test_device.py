"""What a GPU would see, tested without one: memory, micro-batches, compiled layers, and how often the host waits."""

import collections
import dataclasses
import json
import multiprocessing
import types

import pytest
import session
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import backend_registration

import train
from configure import Config
from lib.device import fitting_micro_batch, require_compiler, run_bytes
from lib.files import UserError, write_json
from lib.teacher import Teacher
from model import PRESETS, Qwen2, Qwen2Config, init_student, rotary

SHAPES = [Qwen2Config(256, 704, 1, 4, 4, 100), Qwen2Config(256, 1024, 1, 8, 2, 100)]


# --- memory ----------------------------------------------------------------------------------------------------------


def kept_bytes(shape: Qwen2Config, n_rows: int, n_inputs: int, dtype: torch.dtype) -> int:
    """Bytes that autograd keeps of one layer beside its weights."""
    layer = init_student(shape).model.layers[0]
    kept, weights = {}, {p.untyped_storage().data_ptr() for p in layer.parameters()}
    alive = []

    def pack(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        alive.append(t)
        return t

    x = torch.randn(n_rows, n_inputs, shape.hidden_size, dtype=dtype, requires_grad=True)
    cos, sin = (t.to(dtype).unsqueeze(-3) for t in rotary(torch.arange(n_inputs), shape))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        layer(x, cos, sin, None)
    casts = sum(p.numel() * dtype.itemsize for p in layer.parameters()) if dtype != torch.float32 else 0
    return sum(kept.values()) - casts


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_formula_covers_what_autograd_keeps_of_a_layer(shape, dtype):
    two = dataclasses.replace(shape, num_hidden_layers=2)
    rows = {n: run_bytes(s, 1, None, 64, 1, dtype.itemsize, False)[1] for n, s in ((1, shape), (2, two))}
    layer, kept = rows[2] - rows[1], kept_bytes(shape, 3, 64, dtype) / 3
    assert kept <= layer <= 1.3 * kept


def test_the_formulas_fixed_part_and_recomputation():
    shape, teacher = PRESETS["200m"], (1_836_828_672, 2048, 5504, 24, 0)
    fixed, row = run_bytes(shape, 2, teacher, 512, 1, 2, False)
    head = shape.vocab_size * shape.hidden_size
    assert fixed == 2 * (16 * 203_437_824 + 6 * head) + 2 * 1_836_828_672 + 5 * 4 * 512 * shape.vocab_size
    alone = run_bytes(shape, 1, None, 512, 1, 2, False)[1]
    of_teacher = 2 * 512 * (9 * 2048 + 4 * 5504)
    assert row == 2 * alone + of_teacher
    again = run_bytes(shape, 1, None, 512, 1, 2, True)[1]
    layer = (alone - 2 * 512 * 5 * 768) / 12
    assert again == 2 * 512 * (12 + 5) * 768 + layer


@pytest.mark.parametrize(("rows", "group", "room", "fits"),
                         [(16, 1, 99, 1), (16, 1, 100 + 20, 2), (16, 1, 100 + 59, 4), (16, 1, 10**6, 16), (48, 2, 100 + 70, 6), (24, 8, 0, 8)])  # fmt: skip
def test_the_largest_divisor_that_fits_is_taken(rows, group, room, fits):
    assert fitting_micro_batch(rows, group, room, 100, 10) == fits


def test_a_card_gets_what_fits_its_free_memory_and_a_run_keeps_it(tmp_path, monkeypatch):
    (tmp_path / "t").mkdir()
    write_json(tmp_path / "t/config.json", {"model_type": "qwen2", **PRESETS["1.8b"].facts()})
    cfg = Config(out_dir=str(tmp_path), teacher=str(tmp_path / "t"), seq_len=512)
    env = types.SimpleNamespace(world=1, device=torch.device("cuda:0"), dtype=torch.bfloat16)
    fixed, row = run_bytes(PRESETS["200m"], 1, (1_836_828_672, 2048, 5504, 24, 0), 512, 1, 2, False)
    free = int((fixed + 9 * row) / 0.9)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2 * free))
    assert session.choose_micro_batch(cfg) == 8
    (tmp_path / "run.json").write_text(json.dumps({"micro_batch": 4}))
    assert session.choose_micro_batch(cfg) == 4  # a run that goes on keeps its own, for the same bits
    assert session.choose_micro_batch(dataclasses.replace(cfg, micro_batch=2), env) == 2
    torch.device("cpu") = torch.device("cpu")
    assert session.choose_micro_batch(dataclasses.replace(cfg, out_dir="nowhere"), env) == 1


def test_out_of_memory_is_one_line_with_the_next_smaller_value(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "open_data", lambda cfg, name: types.SimpleNamespace(n=10**9))
    for name in ("check_student", "check_methods"):
        monkeypatch.setattr(session, name, lambda *args: None)
    for name in ("open_tokenizer", "check_vocabulary", "check_rows"):
        monkeypatch.setattr(train, name, lambda *args: None)

    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(train, "open_teacher", full)
    for asked, less in ((8, "set --micro_batch=4"), (1, "set --recompute=True, or train fewer methods at once")):
        loaded = types.SimpleNamespace(config=Config(out_dir=str(tmp_path / "out"), micro_batch=asked))
        with pytest.raises(UserError, match=f"micro_batch={asked}: out of memory on cpu; {less}"):
            train.distil(loaded)
    assert not (tmp_path / "out").exists()


def test_a_gpus_compiler_is_looked_for(monkeypatch):
    monkeypatch.setattr("lib.device.shutil.which", lambda name: None)
    with pytest.raises(UserError, match="compile=True: Triton needs a C compiler"):
        require_compiler(torch.device("cuda:0"))


# --- compiled layers -------------------------------------------------------------------------------------------------


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
    cos, sin = (t.bfloat16().unsqueeze(-3) for t in rotary(torch.arange(12), SHAPES[0]))
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


# --- how often the host waits ----------------------------------------------------------------------------------------


def two_updates(into) -> None:
    """Two updates of three students on a device that computes nothing; what the host asked it for, by name."""
    module = backend_registration._DummyBackendModule()
    module.get_amp_supported_dtype = lambda: [torch.bfloat16]
    backend_registration._setup_privateuseone_for_python_backend("standin", module)
    FakeTensor.is_cuda = property(lambda self: self.device.type == "standin")
    asked = collections.Counter()

    def count(name, value):
        def counted(self, *args, **kwargs):
            asked[name] += 1
            return value(self)

        setattr(FakeTensor, name, counted)

    count("tolist", lambda t: [1.0] * t.numel())
    for name in ("item", "cpu", "numpy", "nonzero", "__bool__", "__float__", "__int__"):
        count(name, lambda t: 1.0)
    shape, device = PRESETS["mini"], torch.device("standin:0")
    cfg = Config(methods=("alra", "vanilla_kd", "pretrain"), student="mini", batch_rows=4, micro_batch=2, seq_len=16)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device(device):
        students = []
        for name in cfg.methods:
            model = Qwen2(shape)
            students.append(train.Student(name, model, torch.optim.AdamW(model.parameters(), fused=True), None, {}, ""))
        teacher = Qwen2(shape).requires_grad_(False)
        for p in teacher.parameters():
            p.data = p.data.bfloat16()
        teacher = Teacher(teacher, device)
        env = types.SimpleNamespace(device=device, dtype=torch.bfloat16, world=1, rank=0, stopping=False)
        env.over_processes = lambda n: torch.zeros(3)

        def stream():
            while True:
                x = torch.zeros(2, 16, dtype=torch.long)
                yield train.Batch(x, x.clone(), 30, teacher.hidden(x))

        batches = stream()
        for step in range(2):
            train.update(students, teacher, batches, step, cfg)
    into.put(dict(asked))


def test_the_host_waits_once_in_an_update():
    spawn = multiprocessing.get_context("spawn")  # the stand-in is for a whole process
    found = spawn.SimpleQueue()
    child = spawn.Process(target=two_updates, args=(found,))
    child.start()
    child.join(120)
    assert child.exitcode == 0 and found.get() == {"tolist": 2}
