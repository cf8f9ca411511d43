"""Teachers of any family: native ones against transformers, the others through it, and refusals."""

import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import tokenizers
import torch
import transformers
from torch import nn
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

import eval as ev
import train
from lib.files import write_json
from lib.head import Head
from lib.hf import load_tokenizer, weights_hash
from losses import METHODS
from model import PRESETS, Qwen2, Qwen2Config, init_student, load_config, student_config
from run.methods import head_losses
from run.saved_models import open_checkpoint
from run.teacher import (
    INHERITED,
    check_vocabulary,
    inherited,
    load_shape,
    load_teacher,
)
from run.transformers_models import check_logits, is_near
from tests.test_losses import assert_near
from tests.world import (
    DEMO,
    TOKENIZER,
    V,
    assert_same,
    config,
    distil,
    edit,
    final_bits,
    read_table,
    refusal,
    tensor,
)

SMALL = json.loads("""{
"hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2, "num_attention_heads": 4,
"num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 64,
"initializer_range": 0.3, "pad_token_id": 0
}""")
ONE_LAYER = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
LLAMA3 = json.loads("""{
"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
"original_max_position_embeddings": 32
}""")


def read_models(text):
    """Read lines of a name, a family, and keys of its config."""
    rows = read_table(text)
    return {name: (family, json.loads(keys), *more) for name, family, keys, *more in rows}


NATIVE = read_models("""
qwen3 => qwen3 => {"head_dim": 16, "tie_word_embeddings": true}
qwen3, biased => qwen3 => {"head_dim": 6, "attention_bias": true}
smollm2 => llama => {"tie_word_embeddings": true, "rms_norm_eps": 1e-5}
mistral => mistral => {"sliding_window": null, "head_dim": 8}
""")
ROPE = LLAMA3 | {"rope_theta": 1e4}
NATIVE["llama 3"] = ("llama", {"rope_parameters": ROPE, "unsloth_fixed": True})
FOREIGN = read_models("""
pythia => gpt_neox => {"num_key_value_heads": 4}
olmo 2 => olmo2 => {}
smollm 3 => smollm3 => {}
gemma 3 => gemma3_text => {"head_dim": 8, "sliding_window": 8}
phi 3 => phi3 => {}
jitter => phimoe => {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": null}
mixture of experts => olmoe => {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 40}
mamba => mamba => {"state_size": 4}
gpt 2 => gpt2 => {}
mistral with a window => mistral => {"sliding_window": 8}
a bias => phi => {"hidden_size": 32}
a cap => gemma2 => {"head_dim": 8, "final_logit_softcapping": 2.0}
RecurrentGemma => recurrent_gemma => {"lru_width": 24}
Cohere => cohere => {}
a scale => granite => {"logits_scaling": 1.005}
""")
FOREIGN["a text decoder in a wrapper"] = (
    "gemma3",
    {
        "text_config": SMALL | {"head_dim": 8, "sliding_window": 8},
        "vision_config": ONE_LAYER | {"intermediate_size": 8, "image_size": 28, "patch_size": 14},
    },
)
IDS = torch.randint(0, V, (3, 29), generator=torch.Generator().manual_seed(5))


@pytest.fixture
def make(tmp_path):
    """Return a function that saves a random model with a tokenizer in a folder."""

    def make(family, keys):
        torch.manual_seed(3)
        shape = transformers.AutoConfig.for_model(family, **SMALL | keys)
        model = AutoModelForCausalLM.from_config(shape)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p) * 0.2)  # norms and biases too
        folder = f"{tmp_path}/teacher"
        model.save_pretrained(folder)
        load_tokenizer(TOKENIZER).save_pretrained(folder)
        return folder

    return make


def load(folder):
    return load_teacher(folder, torch.float32, torch.device("cpu"))


def transformers_logits(folder):
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return model(IDS, use_cache=False).logits


def logits(model, ids=IDS):
    h = model.hidden(ids)
    return Head(h, model.head).logits().view(*ids.shape, V)


def check_close(ours, expected):
    assert_near(ours, expected, 1e-5)


@pytest.mark.parametrize("kind", NATIVE)
def test_native_families_have_transformers_logits_before_and_after_saving(kind, make, tmp_path):
    folder = make(*NATIVE[kind])
    if kind == "qwen3, biased":  # a bias on the attention's output is not computed here
        model = AutoModelForCausalLM.from_pretrained(folder)
        for layer in model.model.layers:
            nn.init.zeros_(layer.self_attn.o_proj.bias)
        model.save_pretrained(folder)
    edit(f"{folder}/config.json", "rope_theta=77.0")  # that of `rope_parameters` counts
    expected = transformers_logits(folder)
    ours = Qwen2.from_pretrained(folder)
    check_close(ours(IDS), expected)
    assert ours.config.flops_per_token(13) > 2 * V * 24
    ours.save_pretrained(tmp_path / "again")
    check_close(transformers_logits(tmp_path / "again"), expected)
    assert weights_hash(Qwen2.from_pretrained(f"{tmp_path}/again")) == weights_hash(ours)
    assert isinstance(load(folder).model, Qwen2)


@pytest.mark.parametrize("kind", FOREIGN)
def test_other_families_hidden_states_times_head_are_their_logits(kind, make):
    folder = make(*FOREIGN[kind])
    teacher = load(folder)
    is_native = isinstance(teacher.model, Qwen2)
    assert is_native == (kind == "mistral with a window")
    T = 8 if is_native else 29  # up to its window a Mistral is native
    check_close(logits(teacher, IDS[:, :T]), transformers_logits(folder)[:, :T])
    assert teacher.model.config.flops_per_token(13) > 2 * V * 24
    if kind in ("a bias", "a cap", "a scale"):
        check_gradients(teacher.model.requires_grad_(True))
    if kind in ("mamba", "a scale"):  # Mamba's hidden states are in fp32
        narrow = load_teacher(folder, torch.bfloat16, torch.device("cpu"))
        assert narrow.hidden(IDS).dtype == narrow.head.dtype


def check_gradients(model):
    """Compare the gradients of a cross-entropy with those through transformers' own logits."""
    y = IDS.roll(-1, 1)
    z = model.lm(IDS, use_cache=False).logits
    losses = nn.functional.cross_entropy(z.flatten(0, 1), y.flatten())
    expected = torch.autograd.grad(losses, [*model.parameters()], allow_unused=True)
    student = (model.hidden(IDS, recompute=True), model.head, METHODS["pretrain"])
    ((loss, _),) = head_losses([student], None, None, y, group=3, chunk=y.numel())
    loss.backward()
    for p, gradient in zip(model.parameters(), expected, strict=True):
        if gradient is not None:
            assert_near(p.grad, gradient, 1e-5, 1e-6)


def fp8(x):
    """Blocks of 16 x 8 with a scale each, as Qwen3 is published."""
    blocks = x.unflatten(1, (-1, 8)).unflatten(0, (-1, 16))  # [., 16, ., 8]
    scale = blocks.abs().amax((1, 3), keepdim=True) / 448
    q = (blocks / scale).to(torch.float8_e4m3fn)
    parts = {"": q.view_as(x), "_scale_inv": scale[:, 0, :, 0]}
    return parts, (q.float() * scale).view_as(x)


def mxfp4(x):
    """Codes of 4 bits, two in a byte, and an exponent for each 32 of them, as gpt-oss has them."""
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = torch.randint(16, (*x.mT.shape[:-1], x.shape[1] // 32, 32))
    exponents = torch.randint(118, 123, codes.shape[:-1])
    values = torch.cat((numbers, -numbers))[codes] * 2.0 ** (exponents - 127)[..., None]
    blocks = codes[..., ::2] + 16 * codes[..., 1::2]
    parts = {"_blocks": blocks.byte(), "_scales": exponents.byte()}
    return parts, values.flatten(-2).mT.contiguous()


QUANTIZED = {
    "fp8": ("qwen3", "proj.weight", fp8, {"weight_block_size": [16, 8]}),
    "fp8 mixture": ("qwen3_moe", "proj.weight", fp8, {"weight_block_size": [16, 8]}),
    "mxfp4": ("gpt_oss", "_proj", mxfp4, {}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_teachers_are_those_of_the_dequantized_weights(kind, dtype, make, tmp_path):
    family, suffix, quantize, keys = QUANTIZED[kind]
    sizes = {"hidden_size": 32, "intermediate_size": 32, "head_dim": 8, "num_local_experts": 4}
    sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    folder = make(family, sizes)
    file = f"{folder}/model.safetensors"
    stored = {}
    exact = {}
    for name, x in safetensors.torch.load_file(file).items():
        parts = {"": x.bfloat16()}
        exact[name] = x.bfloat16().float()
        if name.endswith(suffix):
            parts, exact[name] = quantize(x)
        stored |= {name + part: t.contiguous() for part, t in parts.items()}
    safetensors.torch.save_file(exact, file, {"format": "pt"})
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    safetensors.torch.save_file(stored, file, {"format": "pt"})
    facts = {"quant_method": kind.partition(" ")[0], **keys}
    edit(f"{folder}/config.json", f"quantization_config={json.dumps(facts)}", 'dtype="bfloat16"')
    teacher = load_teacher(folder, dtype, torch.device("cpu"))
    with torch.no_grad():
        assert torch.equal(teacher.hidden(IDS), expected.base_model(IDS)[0])
    assert torch.equal(teacher.head, expected.lm_head.weight)
    assert "quantization_config" not in load_shape(folder).config


def test_flops_of_a_mixture_count_its_active_experts_alone(make):
    teacher = load(make(*FOREIGN["mixture of experts"]))
    per_expert = 3 * 24 * 40  # gate, up and down; two of four are active
    attention = 2 * 24 * 24 + 2 * 24 * 12
    router = 4 * 24
    norms = 24 + 12 + 2 * 24  # OLMoE has norms on q [24] and k [12]
    weights = 2 * (attention + router + norms + 2 * per_expert) + 24 + V * 24
    assert teacher.model.config.flops_per_token(13) == 2 * weights


def test_a_preset_takes_from_the_teacher_what_it_does_not_say(make):
    shape = student_config("200m", inherited(make(*NATIVE["llama 3"])))
    assert (shape.vocab_size, shape.max_position_embeddings, shape.hidden_size) == (V, 64, 768)
    assert (shape.rope_theta, shape.rms_norm_eps, shape.rope_scaling) == (1e4, 1e-6, LLAMA3)
    assert shape.attention_bias and not shape.qk_norm
    qwen = {key: getattr(PRESETS["1.8b"], key) for key in INHERITED}  # Qwen1.5-1.8B's
    for name, teacher in (("200m", qwen), ("500m", qwen), ("demo", inherited(DEMO))):
        assert student_config(name, teacher) == PRESETS[name]
    inline = student_config("16x1x2", qwen)
    assert inline == student_config(json.dumps(ONE_LAYER), qwen)
    assert (inline.num_key_value_heads, inline.vocab_size) == (2, 151_936)
    assert student_config("512x8x4", qwen).intermediate_size == 1408  # 8 / 3, in steps of 64
    with refusal("expected a vocab_size"):
        student_config("512x8x4")


def test_vocabularies_that_differ_in_padding_are_cut_to_the_smaller(make, tiny, tmp_path):
    """The same bits as from a teacher and a student without the padding."""
    shape = Qwen2Config(16, 24, 1, 2, 2, vocab_size=V + 7, max_position_embeddings=64)
    folder = tmp_path / "student"
    flags = "--methods=vanilla_kd --max_steps=2 --schedule_steps=2 --warmup_steps=1"
    models = f"--student={folder} --student_weights={folder} --teacher={tmp_path}/cut"
    wide = make("mistral", {"vocab_size": V + 5, "sliding_window": None})
    students = []
    for pad_t, pad_s in ((0, 0), (5, 0), (0, 7), (5, 7)):
        teacher = Qwen2.from_pretrained(wide)
        teacher.cut(V + pad_t)
        teacher.save_pretrained(tmp_path / "cut", load_tokenizer(TOKENIZER))
        student = init_student(shape)
        student.cut(V + pad_s)
        student.save_pretrained(folder)
        out = tmp_path / f"{pad_t}-{pad_s}"
        distil(tiny, out, f"{flags} {models}")
        students.append(Qwen2.from_pretrained(f"{out}/vanilla_kd"))
    assert [s.config.vocab_size for s in students] == [V, V, V, V + 5]
    assert len({weights_hash(s) for s in students[:3]}) == 1


@pytest.mark.parametrize("special", [True, False])
def test_a_special_token_beyond_the_vocabulary_is_in_no_text(special):
    tokenizer = load_tokenizer(TOKENIZER)
    tokenizer.add_tokens(tokenizers.AddedToken("<image>", special=special))
    if special:
        check_vocabulary("teacher", V, tokenizer)
    else:
        with refusal(f"vocabulary of {V:,}, but the tokenizer has {V + 1:,} tokens"):
            check_vocabulary("teacher", V, tokenizer)


@pytest.mark.parametrize("kind", ["mixture of experts", "a text decoder in a wrapper"])
def test_students_of_other_families_learn_resume_and_are_saved(
    kind, make, tiny, tmp_path, monkeypatch, printed
):
    """And they are scored beside their teacher, which is of the same family."""
    folder = make(*FOREIGN[kind])
    shutil.copytree(tiny / "data", tmp_path / "data")
    flags = "--methods=alra --schedule_steps=2 --warmup_steps=1 --checkpoint_every_steps=1"
    bf16 = f"--student_weights={folder} --recompute=True --save_dtype=bfloat16"
    for out, text in (
        ("whole", "--max_steps=2"),
        ("half", "--max_steps=1 --teacher_cache=True"),
        ("half", "--max_steps=2 --teacher_cache=True"),
        ("bf16", f"--max_steps=2 --dtype=bfloat16 {bf16}"),
    ):
        keys = dict.fromkeys(("teacher", "student"), folder)
        keys["data_dir"] = tmp_path / "data"
        distil(tiny, tmp_path / out, f"{flags} {text}", **keys)
    assert final_bits(tmp_path / "whole", "alra", 2) == final_bits(tmp_path / "half", "alra", 2)
    for out, dtype in (("whole", torch.float32), ("bf16", torch.bfloat16)):
        opened = open_checkpoint(f"{tmp_path}/{out}/alra")  # checks its weights and shape
        model = load_teacher(opened.folder, torch.float32, torch.device("cpu"))
        check_close(logits(model), transformers_logits(opened.folder))
        saved = AutoModelForCausalLM.from_pretrained(opened.folder, dtype="auto")
        assert saved.dtype == dtype and saved.generation_config.eos_token_id == 0
        assert saved.get_input_embeddings().padding_idx is None  # that token is trained like others
    monkeypatch.chdir(tmp_path)
    printed()
    ev.main([f"{tmp_path}/whole", folder, "--tasks=none"])
    assert re.search(r"/teacher \|.* 0\.0000 ", printed())  # its KL to itself


def test_a_foreign_model_is_tried_on_a_few_tokens():
    """UNFIT has models that fail at it."""
    with refusal("SimpleNamespace has no output embedding"):
        check_logits("x", SimpleNamespace(get_output_embeddings=lambda: None))
    assert not is_near(torch.full((2,), math.nan), torch.ones(2), 1.0)


# a key of config.json, and whether this decoder computes the model, or transformers
KEYS = read_table("""
qwen2 => num_key_value_heads=4 => native
llama => head_dim=null => native
qwen3 => layer_types=["full_attention", "full_attention"] => native
qwen3 => quantization_config=null => native
mistral => attention_bias=true => native
mistral => use_sliding_window=true => foreign
qwen2 => rope_scaling={"type": "linear", "factor": 2.0} => foreign
llama => partial_rotary_factor=0.5 => foreign
llama => hidden_act="gelu" => foreign
llama => sliding_window=8 => native
""")


@pytest.mark.parametrize(("family", "change", "by"), KEYS)
def test_a_model_with_any_key_has_transformers_logits(family, change, by, make):
    keys = {"num_key_value_heads": 4}
    if family == "mistral":
        keys["sliding_window"] = None
    folder = make(family, keys)
    edit(f"{folder}/config.json", change)
    teacher = load(folder)
    assert isinstance(teacher.model, Qwen2) == (by == "native")
    check_close(teacher.hidden(IDS) @ teacher.head.T, transformers_logits(folder))


def test_a_config_may_hold_an_infinite_number(make):
    """As Mamba-2's do."""
    folder = make(*FOREIGN["mamba"])
    file = Path(folder, "config.json")
    file.write_text(file.read_text().replace("{", '{"time_step_limit": [0.0, Infinity],', 1))
    assert load_shape(folder).vocab_size == V


MASKED = read_table("""
bias => gpt2 => {}
attention.bias => gpt_neo => {"num_layers": 2, "attention_types": [[["global", "local"], 1]]}
""")


@pytest.mark.parametrize(("mask", "family", "keys"), MASKED)
def test_masks_that_old_checkpoints_hold_are_left_out(mask, family, keys, make):
    folder = make(family, json.loads(keys))
    file = f"{folder}/model.safetensors"
    tensor(file, f"transformer.h.0.attn.{mask}", "torch.ones(1, 1, 64, 64).tril()")
    tensor(file, "transformer.h.0.attn.masked_bias", "torch.tensor(-1e4)")
    teacher = load(folder)
    check_close(teacher.hidden(IDS) @ teacher.head.T, transformers_logits(folder))


UNFIT = r"""
olmo2 => {} => num_hidden_layers=1 => has no place for tensor model.layers.1\..* \(11 in all\)
olmo2 => {} => num_hidden_layers=1000000 => num_hidden_layers=1000000, but its safetensors have 25
olmo2 => {} => rope_parameters=3 => config.json: cannot be used
qwen3 => {"head_dim": 6} => layer_types=["sliding_attention","full_attention"] sliding_window=8 => \
cannot be used
qwen3 => {"head_dim": 6} => is_causal=false => depend on later tokens
llama4_text => {"intermediate_size_mlp": 36, "num_local_experts": 2} => use_cache=true => \
its logits are not hidden states times head
"""


@pytest.mark.parametrize(("family", "keys", "changes", "message"), read_table(UNFIT))
def test_a_model_that_does_not_fit_is_refused(family, keys, changes, message, make):
    """Its config the tensors, or its logits a head; or transformers refuses a layer."""
    folder = make(family, json.loads(keys))
    edit(f"{folder}/config.json", *changes.split())
    with refusal(message):
        load(folder)


def test_a_model_without_its_head_is_refused(make):
    folder = make(*FOREIGN["olmo 2"])
    transformers.AutoModel.from_pretrained(folder).save_pretrained(folder)
    with refusal(r"missing tensor lm_head\.weight"):
        load(folder)


def test_a_weight_that_few_texts_touch_must_be_finite_too(make):
    folder = make(*FOREIGN["olmo 2"])
    spoiled = "torch.cat((x[:-1], x[-1:] * torch.nan))"
    tensor(f"{folder}/model.safetensors", "model.embed_tokens.weight", spoiled)
    with refusal(r"model\.embed_tokens\.weight is not finite"):
        load(folder)


@pytest.mark.parametrize(
    ("family", "head_dim", "context"),
    [("qwen3", 128, 32_768), ("mistral", 64, 4096), ("llama", 64, 2048)],
)
def test_what_a_config_leaves_out_is_the_familys_default(family, head_dim, context, tmp_path):
    facts = {"model_type": family, "hidden_size": 128, "vocab_size": 9, "num_key_value_heads": 2}
    write_json(tmp_path / "config.json", ONE_LAYER | {"intermediate_size": 8} | facts)
    shape = load_config(f"{tmp_path}/config.json")
    assert (shape.head_dim, shape.max_position_embeddings) == (head_dim, context)
    assert shape.qk_norm == (family == "qwen3") and not shape.attention_bias


def test_several_teachers_are_the_mean_of_their_probabilities(tiny, make, tmp_path):
    """One has a cap on its logits, one a padded vocabulary. Record and cache know all."""
    padded = tmp_path / "padded"
    small = Qwen2Config(16, 24, 1, 2, 1, vocab_size=V + 8)
    init_student(small, 3).save_pretrained(padded, load_tokenizer(TOKENIZER))
    capped = make("gemma2", {"final_logit_softcapping": 3.0, "head_dim": 8})
    names = [f"{tiny}/teacher", capped, f"{padded}"]
    teacher = load(",".join(names))
    z = Head(teacher.hidden(IDS), teacher.head).logits()
    one_by_one = [load(name) for name in names]
    zs = [Head(t.hidden(IDS), t.head[:V]).logits() for t in one_by_one]
    mean = sum(each.double().softmax(-1) for each in zs) / 3
    assert_close(z.double().exp(), mean, rtol=1e-5, atol=1e-12)

    data = shutil.copytree(tiny / "data", tmp_path / "data")
    flags = "--methods=vanilla_kd --max_steps=2 --teacher_cache="
    keys = {"teacher": ",".join(names), "data_dir": data}
    for cache in ("False", "True"):
        distil(tiny, tmp_path / cache, flags + cache, **keys)
    assert_same(tmp_path / "False", tmp_path / "True", "vanilla_kd", 2)
    keys["teacher"] = ",".join(names[:2])
    with refusal("teacher_sha256 was"):
        train.distil(config(tiny, tmp_path / "True", flags + "True", **keys))
