# SmolLM2-135M teaches a student of 29.5M parameters on local text. A laptop is enough.
#
#   python prepare.py config/smollm2_30m.py [--source=FILE_OR_FOLDER]
#   python train.py config/smollm2_30m.py
#   python eval.py out/smollm2_30m --tasks none
#
# Without --source the text is that of the demo, Python source. The 0.51M tokens take about 36
# minutes on two cores, at the 240 tokens/s of a run of 120 updates (study/LOG.md).

methods = ("alra",)
student = "384x6x6"  # with the teacher's vocabulary (49,152), rope base, norm epsilon and context
teacher = "HuggingFaceTB/SmolLM2-135M"  # NAME@COMMIT pins a commit; run.json records the one used
data_dir = "data/smollm2"
out_dir = "out/smollm2_30m"

source = "demo/text.jsonl.zst"
n_documents = None
train_rows = None
val_rows = 0
val_share = 0.02
seq_len = 256

shuffle = True
repeat_rows = True
max_steps = 500  # * 4 rows * 256 inputs = 0.51M nominal tokens
schedule_steps = 500
batch_rows = 4
micro_batch = 4
lr = 2e-3
min_lr = 2e-4
warmup_steps = 50
val_every_steps = 50
val_max_rows = 64
checkpoint_every_steps = 50
compile = True
