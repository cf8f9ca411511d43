"""Broken inputs: a script ends with one line that names the file or key, or it goes on rightly.

A case is a command, what is broken before it in a copy of one small world, and a pattern of the
line on stderr. Nothing else may change.
"""

import contextlib
import errno
import glob
import importlib
import itertools
import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

import configure
import eval as ev
import prepare
import train
from lib import files
from lib.errors import UserError
from lib.rows import quick_hash
from model import Qwen2Config, StudentDecoder, init_student
from run import checkpoints
from run.provenance import file_hash
from tests import world

CONFIG = """
methods = ("pretrain", "alra")
hyper = {"alra": {"d_max": 7}}
student, teacher, source = "student", "teacher", "text"
data_dir, out_dir, device = "data", "run", "cpu"
n_documents = train_rows = None
val_rows, seq_len, batch_rows, micro_batch = 5, 16, 4, 2
max_steps = schedule_steps = 4
warmup_steps = 1
lr, min_lr = 1e-2, 1e-3
log_every_steps = val_every_steps = 1
checkpoint_every_steps = 1
val_max_rows = 4
"""
TRAIN = "train.py cfg.py"
NEW = "train.py cfg.py --out_dir=new"
HALF = "train.py cfg.py --out_dir=half"
COMPARE = "study/compare.py cfg.py --methods=alra --out=new"
PREPARE = "prepare.py cfg.py --data_dir=rows"
GO_ON = "prepare.py cfg.py --data_dir=stopped"
EVAL = "eval.py run/alra --tasks none --rows data --max_rows 4 --max_length 32 --device cpu"
SCORE = "eval.py run/alra --tasks lambada_openai --data_dir items --max_length 32 --device cpu"
PIQA = "eval.py run/alra --tasks=piqa --data_dir=items --any_items --max_length=32"
STORIES = "eval.py run/alra --tasks=storycloze_2016 --data_dir=items --max_length=32"
SAMPLE = "tools/sample.py run/alra --prompt a --tokens 2"
STEP = "half/alra/checkpoints/step_00000003"
BRANCH = f"{NEW} --methods=alra --resume_from={STEP}"
WEIGHTS = "teacher/model.safetensors"
MODEL = "run/alra/model/model.safetensors"
NORM = "model.norm.weight"
ITEMS = "items/lambada_openai/test.jsonl"


def shell(command):
    subprocess.run(command, shell=True, check=True)


def fill_rows(name, token):
    """Fill a rows file with one id; the manifest describes the new bytes."""
    file = Path(f"data/{name}.bin")
    np.full(file.stat().st_size // 4, int(token), np.uint32).tofile(file)
    world.edit(f"data/{name}.json", f'quick_sha256="{quick_hash(file)}"')


CHANGES = {"set": world.edit, "tensor": world.tensor, "fill": fill_rows}


def apply(causes):
    """Break the copy by a word of CHANGES with its arguments, or the shell, and then the next."""
    for cause in causes.split(" then "):
        word, *arguments = cause.split()
        if word in CHANGES:
            CHANGES[word](*arguments)
        else:
            shell(cause)


FLAGS = r"""
nowhere.py => nowhere.py: no such config file
--lr=nan => lr='?nan'?: expected
--lr=x => lr='?x'?: expected float
--lr => --lr: expected --lr=VALUE
--lrr=1 => no such key 'lrr', did you mean lr\?
--methods= => methods=.*expected at least one
--methods=alr => no such method 'alr', did you mean alra\?
--tad.beta=2 => settings of .*tad
--alra.d_mx=7 => alra takes no d_mx; it takes anchor, budget, coefficients.* did you mean d_max
--alra.tau=0 => alra.tau=0.*: expected
--alra.pair=prau => alra.pair='prau': expected 'swpra' or
--alra.d_max=259 => alra: d_min=3, d_max=259: expected 2 <= d_min <= d_max < V
--device=cuda => device=cuda: expected cpu, or cuda
--seq_len=12 => seq_len=12: data has rows for seq_len=16
--teacher=none => teacher=None: .*learns from one
--teacher=nowhere => nowhere: no such folder
--student=demmo => student=demmo: expected a preset \(.*, did you mean demo\?
--student=16x1x3 => num_attention_heads=3: expected a divisor of hidden_size=16
'--student={"hidden_size": 16, "layers": 1}' => expected hidden_size, num_hidden_layers
--student_weights=teacher => student_weights=teacher: not of the shape of student=student
--data_dir=text => text: no train.bin with train.json
--micro_batch=3 => micro_batch=3: expected a divisor
--group=2 --micro_batch=1 => micro_batch=1: expected a multiple
--group=3 => group=3: expected a divisor
--shard=2 => shard=2: expected a divisor
--min_lr=1 => min_lr=1.0: expected at most
--warmup_steps=4 => warmup_steps=4: expected less than schedule_steps=4
--lr_schedule=linear => lr_schedule=linear: expected cosine, wsd or constant
--keep_every_steps=3 --checkpoint_every_steps=2 => keep_every_steps=3: expected a multiple of check
--max_steps=5 => max_steps=5: expected at most schedule_steps=4
--val_share=0.1 => val_rows=5 with val_share=0.1
--out_dir=cfg.py => cfg.py
--resume_from=half/alra => resume_from=half/alra: no checkpoint; expected out/NAME/METHOD/ch
--learning-rate=1 => no such key 'learning-rate', did you mean lr\? --help
--epochs=1 => no such key 'epochs', did you mean max_steps with repeat_rows\?
--batch_size=1 => no such key 'batch_size', did you mean batch_rows\?
--max_steps=1.5 => max_steps=1.5: expected int
--methods=alra@a,alra@a => duplicate 'alra@a'
--compile=1 => compile=1: expected bool
--dtype=int8 => dtype='int8': expected 'auto' or 'float32' or 'bfloat16'
cfgg.py => cfgg.py: no such config file \(\*.py\), did you mean cfg.py\?
"""
OTHER = "cp -r teacher other then set other"
PERMUTED = f"{OTHER}/tokenizer.json model.vocab.a=66 model.vocab.b=65"
SHORT = f"{OTHER}/config.json max_position_embeddings=8"
ADDS_BOS = f'{OTHER}/tokenizer_config.json add_bos_token=true bos_token="<|endoftext|>"'
OTHER_ID = f"{OTHER}/tokenizer_config.json "
OTHER_ID += 'added_tokens_decoder={"7":{"content":"<|endoftext|>"}}'
ADAPTER = "cp -r teacher other; cd other; mv config.json adapter_config.json"
OTHER_EVAL = EVAL.replace("run/alra", "other")
OTHER_SAMPLE = SAMPLE.replace("run/alra", "other")
COMMANDS = rf"""
{NEW} --resume_from={STEP} --max_steps=2 => max_steps=2: new is at step 3; set at least that
{NEW} --resume_from={STEP} --student=16x1x2 => resume_from=.*: shape.hidden_size was
{HALF} --max_steps=2 => max_steps=2: half is at step 3
{TRAIN} --out_dir=run/alra => out_dir=run/alra: its run.json is of alra; choose another
{HALF} --methods=alra => out_dir=half: its run.json is of pretrain,alra; choose
{BRANCH} --batch_rows=8 => resume_from={STEP}: batch_rows was 4, now 8; expected the same
train.py => no config: expected one, such as config/alra_200m.py, or --KEY=VALUE; --help
{EVAL} --max_rows 0 => --max_rows 0: expected at least 1
{EVAL} --tasks lambada => --tasks: no .'lambada'. in the heldout set, which has .*lambada_op
{EVAL} --skip_rows=11 => --skip_rows 11: data has 5 held-out rows
eval.py teacher --tasks=none --out=run/alra => nothing to score; name a folder with val.bin
eval.py run/alrra => run/alrra: no such folder, did you mean run/alra\?; a hub id is
eval.py run/alra --limit=1 => --limit 1: expected at least 2
tools/plot.py nowhere => nowhere: no log.jsonl with entries; expected a run's folder
tools/sample.py nowhere => nowhere: no such folder
eval.py run/alra --tasks=piqa --max_length=32 => baber/piqa: cannot be used .*; .*--tasks none
{SAMPLE} --prompt={"a" * 64} => --prompt: 65 tokens with the first, run/alra takes 64
{PREPARE} --source=nowhere/x.jsonl => source=nowhere/x.jsonl: no such file
{PREPARE} --source=texd/ => source=texd/: no such file, or none .*, did you mean text\?
{PREPARE} --source=pyhton => source=pyhton: cannot be used .*; expected a file or a hub dataset
{PREPARE} --source=data => source=data: no such file, or none that ends in
{PREPARE} --source=text --source_split=x => source=text: split=x is for a dataset on the hub
{PREPARE} --teacher=none => tokenizer=None, teacher=None
{PREPARE} --val_rows=1000 => leave no row for train
{PREPARE} --val_rows=0 => val_rows=0 with val_share=0: training needs held-out rows
{PREPARE} --n_documents=2 --val_rows=0 --val_share=1e-6 => 2 records leave no row for val
{COMPARE} --seed=3 => --seed=3: would have no effect; set --seeds=N or --out=FOLDER
{COMPARE} --tunes=x => --tunes=x: no such key 'tunes'
{COMPARE} --reference=vanila_kd => --reference=vanila_kd: expected one of alra
{COMPARE} --tune=gamma=1,2 => --tune=gamma=1,2: expected lr=RATE,RATE,.., and beside it METHOD.SET
{COMPARE} --tune=lr=0,1 => alra.lr=0.0: expected float more than 0
{COMPARE} --tad.beta=3 => settings of \['tad'\], not among methods=\('alra',\)
{NEW} --max_steps=5000 --schedule_steps=5000 => max_steps=5000: needs 20,000 rows, data has (\d+); \
set --max_steps=\d+ --schedule_steps=\d+, or set --repeat_rows=True
{TRAIN} --lr=2e-2 --clip=1 --beta1=0.8 --beta2=0.9 => \
run/pretrain/checkpoints/step_00000004: contains a different run \
\(pretrain: lr was 0.01, now 0.02; beta1 was 0.9, now 0.8; beta2 was .*\); choose
prepare.py cfg.py --seq_len=8 => data: holds data of another recipe
prepare.py cfg.py --data_dir=data,b => data_dir=data,b: prepare.py writes one folder
"""
# a command, what is broken before it, and the message
BROKEN = rf"""
{NEW} => sed -i s/rows/x/ data/train.json => \
data/train.json: cannot be used .KeyError: 'rows'.; .*prepare it again
{NEW} => set data/train.json quick_sha256="0" => \
data/train.bin: not the bytes that train.json describes
{NEW} => cd data; cp train.bin val.bin; cp train.json val.json => \
data: val.bin has the rows of train
{NEW} => sed -i 's/"eos_id": 0/"eos_id": 3/' data/*.json => \
data: eos_id=3, the tokenizer has 0; prepare it again
{NEW} => sed -i 's/\(tokenizer_sha256": "\)./\1x/' data/*.json => \
tokenizer teacher: not the one that data was prepared with
{NEW} => fill train 259 => data/train.bin: an id beyond the vocabulary of 259
{NEW} => echo {{ > teacher/config.json => teacher.*: cannot be used
{NEW} => echo '{{"model_type": "t5"}}' > teacher/config.json => teacher: t5 is an encoder-decoder
{NEW} => set student/config.json vocab_size=100 => \
student=student: vocabulary of 100, but the tokenizer has 257 tokens
{NEW} => set teacher/config.json vocab_size=100 => \
teacher=teacher: vocabulary of 100, but the tokenizer has 257 tokens
{NEW} => rm teacher/config.json => teacher.*config.json
{NEW} => rm {WEIGHTS} => teacher: no model.safetensors
{NEW} => truncate -s -100 {WEIGHTS} => {WEIGHTS}: cannot be used
{NEW} => rm {WEIGHTS}; touch teacher/pytorch_model.bin => no model.safetensors; convert the pickle
{NEW} => rm {WEIGHTS}; touch teacher/adapter_config.json => safetensors; merge the adapter
{NEW} => tensor {WEIGHTS} {NORM} x*float("nan") => {WEIGHTS}: {NORM} .*finite
{NEW} => tensor {WEIGHTS} {NORM} None => teacher: missing tensor {NORM}
{NEW} => tensor {WEIGHTS} more torch.ones(1) => {WEIGHTS}: .*more
{NEW} => tensor {WEIGHTS} {NORM} x[:-1] => {WEIGHTS}: {NORM} is \(11,\)
{NEW} => tensor {WEIGHTS} {NORM} x.int() => \
{WEIGHTS}: {NORM} is I32; expected weights that are not quantized
{NEW} => tensor {WEIGHTS} lm_head.weight torch.ones(259,12) => \
{WEIGHTS}: .*: a second embedding or tied head, which differs
{NEW} => set teacher/config.json quantization_config={{"bits":4}} => \
teacher: config.json has a quantization_config
{NEW} => rm teacher/tokenizer.json => teacher: no tokenizer.json
{NEW} => sed -i s/eos_token/x/ teacher/tokenizer_config.json => \
teacher: the tokenizer has no eos_tok
{HALF} => echo '{{"config": {{}}}}' > half/run.json => half/run.json: cannot be used
{HALF} => set {STEP}/state.json made_by.data_sha256="x" => \
{STEP}: contains a different run .alra: data_sha256 was .x.
{HALF} => cd half; rm -r alra/checkpoints; cp -r pretrain/checkpoints alra => \
a different run .alra: methods was .pretrain., now .alra.
{NEW} --student=other --student_weights=other => {PERMUTED} => its tokenizer gives
{NEW} --teacher=other --tokenizer=teacher => {PERMUTED} => \
teacher=other: its tokenizer gives 'a' id 66, that of the rows 65
{EVAL} --teacher other => {PERMUTED} => teacher=other: its tokenizer gives 'a'
{EVAL} --teacher other => {SHORT} => seq_len=16: teacher=other supports 8 positions
{HALF} --mask_documents=True => : => \
different run .pretrain: mask_documents was False, now True
{NEW} --mask_documents=True => set teacher/config.json logit_scale=0.5 => \
mask_documents=True: teacher is computed by transformers, expected one of qwen2, qwen3
{NEW} --mask_documents=True => set student/config.json logit_scale=0.5 => \
mask_documents=True: student is computed by transformers
{BRANCH[:-1]}4 => mv {STEP} {STEP[:-1]}4 => its name is not that of step 3
{EVAL} => tensor {MODEL} {NORM} x*float("nan") => {NORM} .*finite
{EVAL} => fill val 1000 => data/val.bin: .*id
{OTHER_EVAL} => {ADDS_BOS} => add_bos_token is True in tokenizer_config.json, but
{OTHER_SAMPLE} => {ADDS_BOS} => add_bos_token is True in tokenizer_config.json, but
{OTHER_EVAL} => {OTHER_ID} => give '<\|endoftext\|>' the id 7, but it is loaded with
{NEW} --teacher=other => {OTHER_ID} => give '<\|endoftext\|>' the id 7, but it is loaded with
{OTHER_EVAL} => {ADAPTER} => merge the adapter with its model, and save that
{NEW} --teacher=other => {ADAPTER} => merge the adapter with its model, and save that
{EVAL} => fill val 4294967295 => the chosen held-out rows have no targets; choose others
{NEW} --data_dir=data,b => cp -r data b => data,b: two folders hold the same rows
{NEW} --data_dir=data,b => cp -r data b then set b/train.json val_share=0.5 sha256="b" => \
data,b: val_share is \[0.0, 0.5\]; prepare all with one config
{NEW} => echo {{ > data/train.json => data/train.json: cannot be used
{NEW} => truncate -s -100 data/train.bin => data/train.bin: not the bytes that train.json describes
{NEW} => rm data/val.bin => data: no val.bin with val.json
{HALF} => rm -r half/alra/checkpoints => half: its students have no checkpoint in common
{HALF} => echo {{ > half/alra/stopped.json => half/alra/stopped.json: cannot be used
{EVAL} => cp -r run/pretrain/model run/alra => run/alra: its model/ is not the one that run
{EVAL} => cd run/alra; rm -r model checkpoints => run/alra: no model/ in it
{EVAL} => truncate -s -100 {MODEL} => {MODEL}:
{EVAL} => rm data/val.bin => data: no val.bin
{SCORE} => echo {{ > {ITEMS} => lambada_openai
{SCORE} => echo [1] > {ITEMS} => lambada_openai
{PIQA} => : => items/piqa/validation.jsonl: no such file; --tasks can leave out piqa
{PIQA} => mkdir items/piqa; : > items/piqa/validation.jsonl => \
items/piqa/validation.jsonl: cannot be used .*expected items of piqa
{PIQA} => mkdir items/piqa; printf '{{"goal": "a"}}\n{{\n' > items/piqa/validation.jsonl => \
items/piqa/validation.jsonl, line 2: cannot be used .JSONDecodeError
{STORIES} => : => storycloze_2016: its authors give the items out on request
{STORIES} --storycloze=a.csv => : => a.csv: cannot be used .FileNotFoundError
{STORIES} --storycloze=a.csv => printf 'InputSentence1\n\351\n' > a.csv => a.csv: cannot be used
{SAMPLE} => echo {{ > run/alra/run.json => run/alra/run.json: cannot be used
{GO_ON} => echo {{ > stopped/prepare.state => stopped/prepare.state: cannot be used
{GO_ON} => : > stopped/train.bin.tmp => stopped/train.bin.tmp:
{NEW} bad.py => printf "lr = = 1" > bad.py => does not run: SyntaxError
{NEW} bad.py => printf "x = 1" > bad.py => no such key 'x'
{NEW} bad.py => echo 'hyper = {{"arla": {{"d_max": 3}}}}' > bad.py => 'arla', did you mean alra\?
{NEW} bad.py => echo "lr = '1e-3'" > bad.py => lr='1e-3': expected float
{PREPARE} --source=a.jsonl => echo {{ > a.jsonl => a.jsonl
{PREPARE} --source=e.jsonl => : > e.jsonl => rows: 0 records leave no row for train
{PREPARE} --source=f.jsonl.zst => printf %99s > f.jsonl.zst => f.jsonl.zst
{PREPARE} --source=h.jsonl => printf '{{"text": "a"}}\n{{"content": "a"}}\n' > h.jsonl => \
h.jsonl, record 2: cannot be read .KeyError: 'text'., source_text=text
{PREPARE} --source=h.jsonl => printf '{{"text": "\355\240\275\355\271\202"}}' > h.jsonl => \
h.jsonl, record 1: .*'utf-8' codec .* 0xed
{PREPARE} --source=h.txt => printf '\377\376a\0' > h.txt => \
h.txt, record 1: cannot be read .UnicodeDecodeError: 'utf-8' codec
{PREPARE} --source=h.txt => printf 'a\0b\0' > h.txt => h.txt, record 1: .*contains NUL
{PREPARE} => ln -s gone text/c.jsonl => text/c.jsonl: No such file
prepare.py cfg.py --data_dir=b => mkdir b; echo > b/train.bin => b: contains train.bin, not of
{PREPARE} --tokenizer=other => {OTHER}/tokenizer_config.json eos_token="</s>" => \
lacks its eos_token '</s>'
{PREPARE} --tokenizer=other => {OTHER}/tokenizer_config.json eos_token="a" => \
a text contains its eos_token
{PREPARE} --tokenizer=other => {OTHER}/tokenizer_config.json add_bos_token=true \
bos_token="<|endoftext|>" => other: add_bos_token is True in .*adds no BOS; .* set bos=none
{PREPARE} --tokenizer=other => {OTHER}/tokenizer_config.json add_bos_token=false then set \
other/tokenizer.json post_processor={{"type":"TemplateProcessing","single":[{{"SpecialToken":\
{{"id":"<|endoftext|>","type_id":0}}}},{{"Sequence":{{"id":"A","type_id":0}}}}],"pair":[\
{{"Sequence":{{"id":"A","type_id":0}}}},{{"Sequence":{{"id":"B","type_id":1}}}}],\
"special_tokens":{{"<|endoftext|>":{{"id":"<|endoftext|>","ids":[0],"tokens":\
["<|endoftext|>"]}}}}}} => other: add_bos_token is False in .*adds a BOS; .* set bos=none
{PREPARE} bad.py => echo 'source = ["text", "text"]' > bad.py => source: text: .*expected a dict
{PREPARE} --source=t.jsonl.gz => gzip -c text/a.jsonl | head -c 99 > t.jsonl.gz => \
t.jsonl.gz: cannot be used .*Truncated
{PREPARE} --source=t.jsonl.zst => head -c 9999 {world.ROOT}/demo/text.jsonl.zst > t.jsonl.zst => \
t.jsonl.zst: cannot be used .*Truncated
{COMPARE} study.py => echo "_compare = {{'tittle': 'x'}}" > study.py => \
_compare: cannot be used .*tittle.*; correct its keys
{PREPARE} --tokenizer=other => \
{OTHER}/tokenizer.json decoder={{"type":"WordPiece","prefix":"##","cleanup":true}} => \
tokenizer: decoder .*WordPiece.*: expected a byte-level one
{PREPARE} bad.py => echo 'source = [{{"name": "text/a.jsonl", "share": 0}}, \
{{"name": "text/b.jsonl", "share": 1}}]' > bad.py => share=0.0: expected float more than 0
{PREPARE} bad.py => echo 'source = [{{"name": "text", "txt": "x"}}]' > bad.py => \
unexpected keyword argument 'txt'; expected a dict of name, share; text, con
{NEW} => set data/val.json tokenizer_sha256="x" => data: tokenizer_sha256 differs in train.json
{NEW} => set data/val.json eos_id=3 => data: eos_id differs in train.json and val.json
{NEW} => set student/config.json num_key_value_heads=3 => num_key_value_heads=
{NEW} => set student/config.json max_position_embeddings=8 => student=student supports 8 positions
{NEW} => set teacher/config.json max_position_embeddings=8 => teacher=teacher supports 8 positions
{NEW} => set teacher/config.json hidden_size="x" => teacher/config.json: hidden_size='x'
{NEW} => cd teacher; echo 'raise SystemExit("ran")' > mine.py; \
echo '{{"model_type": "mine", "auto_map": {{"AutoConfig": "mine.Mine"}}}}' > config.json => \
contains custom code
{HALF} => sed -i '2a x' half/alra/log.jsonl => half/alra/log.jsonl, line 3: cannot be used
tools/plot.py run/pretrain --text=x => : => run/pretrain: expected a student of ALRA
tools/plot.py run/alra --text=x => set run/alra/run.json made_by.teacher_sha256="x" => \
teacher: its content has changed since the student was trained
{COMPARE} => mkdir new; echo mine > new/README.md => new: has another README.md; set --out to
{COMPARE} --report => mkdir new; echo mine > new/README.md => new/plan.json: cannot be used
{HALF} => set {STEP}/state.json made_by.teacher_sha256="x" => .alra: teacher_sha256 was .x.
{BRANCH} => set {STEP}/state.json made_by.tokenizer_sha256="x" => tokenizer_sha256 was 'x'
eval.py run --tasks=none => set run/alra/run.json config.data_dir="elsewhere" => \
data_dir: data in one run, elsewhere in another; score them apart .--rows replaces
eval.py run --tasks=none => set run/alra/run.json config.mask_documents=true => \
mask_documents: False in one run, True in another; score them apart
eval.py run/alra --tasks=none => set run/alra/run.json val_sha256="x" => \
data: its content has changed since the student was trained
{EVAL} => set run/alra/run.json made_by.teacher_sha256="x" => \
teacher: its content has changed since the student was trained
{EVAL} => set data/val.json tokenizer_sha256="x" => \
data: rows of another tokenizer than that of run/alra
{EVAL} => set run/alra/model/config.json rope_theta=2e4 => its model/ is not the one that run
{EVAL} => set run/alra/model/config.json probe=[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1] => \
restore the classes for students
{EVAL} --teacher other => {OTHER}/config.json vocab_size=99 => \
teacher=other: vocabulary of 99, but the tokenizer has 257
eval.py other --tasks=none --rows=data --teacher=none --out=run/alra => {SHORT} => \
seq_len=16: other supports 8 positions; set a smaller seq_len
{SCORE} => echo '{{"text": "a b"}}' > {ITEMS} => \
{ITEMS}: 1 items that are not .*of lambada_openai \(sha256 \w+, expected 61497177db7e\); --any_items
"""
CASES = [(f"{NEW} {flag}", ":", message) for flag, message in world.read_table(FLAGS)]
CASES += [(command, ":", message) for command, message in world.read_table(COMMANDS)]
CASES += world.read_table(BROKEN)
FOREIGN = "run.json.new alra/model.tmp/x alra/model.old/x alra/checkpoints/step_00000004.tmp/x"
# afterwards `half` has become what `run` is; a broken newest checkpoint is passed over
GO_ON_RIGHTLY = rf"""
cd half; rm run.json; cd alra/checkpoints; mkdir step_00000006.bak; touch step_00000009
cd half; for f in {FOREIGN}; do mkdir -p $(dirname $f); printf mine > $f; done
cd half; echo process 7 > .alra-lock; truncate -s -1 alra/log.jsonl
cd half; printf mine > x; ln -sf x .alra-lock
printf '{{"step": 4, "lo' >> half/alra/log.jsonl
set {STEP}/state.json files_sha256={{}}
for m in pretrain alra; do cd half/$m/checkpoints; mv step_00000003 step_00000009; cd -; done
rm -r {STEP}
rm {STEP}/state.json
echo {{ > {STEP}/state.json
sed -i s/sums/x/ {STEP}/state.json
cp half/alra/checkpoints/step_00000002/model/model.safetensors {STEP}/model
rm {STEP}/model/model.safetensors
rm {STEP}/training.pt
printf x | dd of={STEP}/training.pt bs=1 seek=2000 conv=notrunc
"""
BEGUN = {"train.py": "new", "prepare.py": "rows"}  # what a refused command may leave behind


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """Text, models, rows, a finished run, and a stopped one: a copy, and the contents."""
    kept = tmp_path_factory.mktemp("faults") / "kept"
    shape = {"vocab_size": 259, "rope_theta": 1e4, "max_position_embeddings": 64}
    tokenizer = world.make_tokenizer()
    student = init_student(Qwen2Config(8, 13, 1, 2, 1, **shape))
    student.save_pretrained(kept / "student", tokenizer)
    teacher = world.make_model(Qwen2Config(12, 13, 1, 2, 1, **shape))
    teacher.save_pretrained(kept / "teacher", tokenizer)
    world.write_text(kept / "text/a.jsonl", 30)
    world.write_text(kept / "text/b.jsonl", 10, seed=2)
    (kept / "cfg.py").write_text(CONFIG)
    (kept / ITEMS).parent.mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(kept)
        prepare.prepare(configure.load(["cfg.py"]))
        for flags in ([], ["--out_dir=half", "--max_steps=3"]):
            assert train.distil(configure.load(["cfg.py", *flags])) == 0
        # before the last commit
        patch.setattr(prepare, "finish", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare.prepare(configure.load(["cfg.py", "--data_dir=stopped"]))
    return shutil.copytree(kept, kept.with_name("copy")), contents(kept)


@pytest.fixture
def folder(pristine, monkeypatch):
    """The copy as the working directory; afterwards what has changed in it is copied anew."""
    copy, kept = pristine
    monkeypatch.chdir(copy)
    yield copy
    names = " ".join({path.split("/")[0] for path in changes(kept, contents(copy))})
    if names:  # of which some are not in the one that is kept
        shell(f"rm -rf {names}; cd ../kept; cp -r {names} ../copy 2>&- || true")


def contents(folder):
    names = glob.glob("**", root_dir=folder, recursive=True, include_hidden=True)
    files = {name: folder / name for name in names if not name.endswith(".alra-lock")}
    return {name: p.read_bytes() if p.is_file() else None for name, p in files.items()}


def changes(before, after):
    return [name for name in before | after if before.get(name, 0) != after.get(name, 0)]


def run(command):
    """Run a script in this process. Returns its exit code."""
    script, *argv = shlex.split(command)
    name = script.removesuffix(".py").replace("/", ".")
    return configure.guard(lambda: importlib.import_module(name).main(argv))


@pytest.mark.parametrize(
    ("command", "cause", "message"), CASES, ids=[f"{c[0].split()[0]}: {c[2]}" for c in CASES]
)
def test_a_broken_input_is_one_line_and_nothing_is_lost(
    command, cause, message, pristine, folder, capfd
):
    _, before = pristine
    if cause != ":":
        apply(cause)
        before = contents(folder)
    code = run(command)
    lines = re.split(r"[\r\n]+", capfd.readouterr().err)
    errors = [line for line in lines if re.match(r"\w*(Error|Traceback)", line)]
    assert code == 1 and len(errors) == 1 and re.search(message, errors[0]), errors
    allowed = BEGUN.get(command.split()[0])
    changed = changes(before, contents(folder))
    if "run.json is of" not in message:  # a folder of another run stays as it is
        changed = [name for name in changed if not name.endswith("/exit.json")]
    assert not [name for name in changed if name.split("/")[0] != allowed], changed


def end_of(out):
    """Return the hashes of a run's two models, and the steps of a log."""
    models = [file_hash(file) for file in sorted(Path(out).glob("*/model/model.safetensors"))]
    return models, [line["step"] for line in world.records(Path(out), "alra")]


@pytest.mark.parametrize("cause", GO_ON_RIGHTLY.strip().splitlines())
def test_what_is_broken_without_loss_goes_on_rightly(cause, folder):
    apply(cause)
    before = contents(folder)
    users = {name for name, content in before.items() if content == b"mine"}
    models, steps = end_of("run")
    assert run(HALF) == 0
    assert end_of("half") == (models, steps)
    assert all((folder / name).read_bytes() == b"mine" for name in users)
    assert not [*folder.rglob("*.alra-[no]*")]


def test_finished_runs_and_rows_are_left_alone_or_mended(folder):
    before = contents(folder / "data")
    assert run("prepare.py cfg.py") == run(GO_ON) == 0 and contents(folder / "data") == before
    for name in ("train.bin", "val.bin"):
        assert (folder / "stopped" / name).read_bytes() == before[name]
    assert run(f"{HALF} --val_every_steps=2 --keep_checkpoints=1") == 0
    assert end_of("half") == end_of("run")
    shell("cd run/alra; rm -r model run.json")
    for command in (TRAIN, EVAL, SAMPLE):
        assert run(command) == 0


@pytest.mark.parametrize(
    ("name", "steps"),
    [("half", [3, 3]), ("half/alra", [3]), ("half/alra/checkpoints/step_00000002", [2])],
)
def test_an_unfinished_run_is_scored_and_sampled_by_a_checkpoint(name, steps, folder, capsys):
    """By its newest one, or by the one that is named; nothing is written into its folder."""
    shell("rm -r half/*/model half/*/run.json")
    before = contents(folder / "half")
    assert run(EVAL.replace("run/alra", name)) == 0
    pattern = r"scoring the checkpoint (\S+)/checkpoints/step_0000000(\d)"
    scored = re.findall(pattern, capsys.readouterr().err)
    assert [int(step) for _, step in scored] == steps
    for out, step in scored:
        place = folder / f"out/eval/{out.replace('/', '_')}_step_0000000{step}"
        *_, result = files.read_lines(place / "results.jsonl")
        assert result["run"]["step"] == int(step)
    assert name == "half" or run(SAMPLE.replace("run/alra", name)) == 0
    assert contents(folder / "half") == before


@pytest.mark.parametrize(("command", "place"), [(HALF, "half"), (GO_ON, "stopped")])
def test_a_folder_at_which_another_process_is_at_work_is_refused(command, place, folder, capsys):
    before = contents(folder)
    with files.locked(folder / place, RuntimeError()):
        assert run(command) == 1
    assert f"another {command.split()[0]} is" in capsys.readouterr().err
    assert contents(folder) == before


# a log and a tokenizer; weights or moments
@pytest.mark.parametrize(("limit", "last"), [(1_000, 2), (15_000, 99)])
def test_a_disk_that_is_full_in_mid_run_and_free_again_costs_nothing(
    limit, last, folder, monkeypatch, capsys
):
    """No file may grow beyond a limit, from the second update to the third, or to the end."""
    command = f"{NEW} --teacher_cache=True"
    update = train.update
    whole = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limited(*args):
        step = args[3]
        if step == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, whole[1]))
        if step == last:
            resource.setrlimit(resource.RLIMIT_FSIZE, whole)
        return update(*args)

    with monkeypatch.context() as patch:
        patch.setattr(train, "update", limited)
        code = run(command)
    resource.setrlimit(resource.RLIMIT_FSIZE, whole)
    output = capsys.readouterr()
    assert code == (last == 99)
    assert code == output.err.count("Error: new/")
    assert run(command) == 0 and end_of("new") == end_of("run")
    for method in ("pretrain", "alra"):
        world.assert_same(Path("new"), Path("run"), method, 4)


def test_a_run_for_which_memory_is_too_small_is_one_line(folder, monkeypatch, capsys):
    error = torch.OutOfMemoryError("CUDA")
    monkeypatch.setattr(train, "open_teacher", mock.Mock(side_effect=error))
    ways = "a smaller micro_batch or chunk_positions, --shard=N, or fewer methods"
    message = f"set --recompute=True, {ways}"
    assert run(NEW) == 1
    assert capsys.readouterr().err == f"UserError: out of memory on cpu: {message}\n"


def test_a_run_whose_output_nobody_reads_goes_on_to_its_end(folder, monkeypatch, capsys):
    """As `| head -1` leaves it, or Ctrl-C with `| tee`, before the checkpoint."""
    read, write = os.pipe()
    os.close(read)
    unread = open(write, "w")  # noqa: SIM115
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", unread)
        assert run(NEW) == 0
        sys.stdout.close()
    with pytest.raises(BrokenPipeError):
        unread.close()
    assert not capsys.readouterr().err and end_of("new") == end_of("run")


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EPERM, errno.ENOTSUP, errno.ENOSPC])
def test_a_file_system_may_lack_optional_calls_and_a_remedy_fits_its_error(
    number, tmp_path, monkeypatch
):
    for name in ("fsync", "chmod"):
        monkeypatch.setattr(os, name, mock.Mock(side_effect=OSError(number, "no")))
    is_full = number == errno.ENOSPC
    ending = world.refusal("no.; free some space$") if is_full else contextlib.nullcontext()
    with ending, files.atomic_folder(tmp_path / "new") as new:
        (new / "file").touch()
    assert (tmp_path / "new").exists() != is_full
    with world.refusal("new'.; check that path and its permissions$"):
        files.atomic_write(tmp_path / "gone/file", "")


@pytest.mark.parametrize("gone", ["new", "new/alra", "new/alra/checkpoints"])
@pytest.mark.parametrize(
    ("owner", "name", "n"), [(train, "update", 2), (StudentDecoder, "save_pretrained", 3)]
)
def test_a_run_makes_no_folder_of_its_own_twice(gone, owner, name, n, folder, monkeypatch, capsys):
    """It is moved before an update, or amid a checkpoint."""
    calls = itertools.count()
    function = getattr(owner, name)

    def moving(*args):
        if next(calls) == n:
            shutil.move(gone, "gone")
        return function(*args)

    monkeypatch.setattr(owner, name, moving)
    assert run(NEW) == 75 and not Path(gone).exists()
    assert capsys.readouterr().err.count("\n") == 1


def test_a_resume_says_which_logs_have_lost_entries(folder, capsys):
    shell("cd half; rm alra/log.jsonl starts.jsonl; sed -i 1d pretrain/log.jsonl")
    assert run(HALF) == 0
    lost = re.findall("half/(.*): has lost entries of the steps before 3", capsys.readouterr().out)
    assert {*lost} == {"alra/log.jsonl", "pretrain/log.jsonl", "starts.jsonl"}


def test_a_failed_checkpoint_is_told_at_once_with_its_cause_and_tried_again(
    folder, monkeypatch, capsys
):
    """An update lasts 70 seconds."""
    save, update, clock = torch.save, train.update, time.perf_counter
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "full"))

    def save_on_full_disk(tensors, file):
        monkeypatch.setattr(torch, "save", save)
        save(tensors, mock.Mock(write=full))

    def slow(students, teacher, stream, step, cfg):
        checkpoints.wait_for_writer()
        if step == 3:
            monkeypatch.setattr(torch, "save", save_on_full_disk)
        monkeypatch.setattr(time, "perf_counter", lambda: clock() + 70 * step)
        return update(students, teacher, stream, step, cfg)

    monkeypatch.setattr(train, "update", slow)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: mock.Mock(free=99))
    flags = "--max_steps=8 --schedule_steps=8 --checkpoint_every_steps=4 --keep_checkpoints=9"
    assert run(f"{NEW} --repeat_rows=True {flags}") == 0
    output = capsys.readouterr().out
    assert "only 0.0 MiB more are free there" in output
    assert re.search("step 4: .*cannot be written .*full.; free some space; .* again", output)
    assert world.saved(Path("new/alra"))[1:3] == ["step_00000005", "step_00000008"]


def test_a_result_that_cannot_be_written_is_tried_before_and_printed_after(
    folder, monkeypatch, capsys
):
    (folder / "new/results.jsonl").mkdir(parents=True)
    with monkeypatch.context() as patch:
        patch.setattr(ev, "score_rows", None)
        assert run(f"{EVAL} --out new") == 1
    shell("rm -r new")
    full = mock.Mock(side_effect=UserError("new/results.jsonl: full"))
    monkeypatch.setattr(ev, "append_line", full)
    assert run(EVAL.replace("alra", "alra teacher --out new")) == 1
    output = capsys.readouterr()
    names = [json.loads(x)["name"] for x in output.out.splitlines() if x.startswith("{")]
    assert names == ["run/alra", "teacher"] and "\nProtocol" in output.out
    assert output.err.endswith("UserError: new/results.jsonl: full\n")


def test_a_special_token_in_a_prompt_is_told(folder, capsys):
    assert run(f"{SAMPLE} --prompt 'x<|endoftext|>'") == 0
    assert "'<|endoftext|>' is one token here, plain text in training" in capsys.readouterr().err


def test_a_students_folder_has_a_page_about_it(folder):
    page = (folder / "run/alra/model/README.md").read_text()
    for text in ("# alra", "- teacher: teacher", "'d_max': 7", "- rows: 16 of data", "CE, nats"):
        assert text in page
    assert re.search(r"tokens: \d+\n.*nats/token: \[\d.*\]\n- commit:", page)
