# SmolLM2-135M teaches a student of 30M parameters (29.5M: width 384, 6 layers) on local text. A laptop is enough.
#
#   python prepare.py config/smollm2_30m.py [--source=FILE_OR_FOLDER]
#   python train.py config/smollm2_30m.py
#   python eval.py out/smollm2_30m --tasks none
#
# Without --source the text is that of the demo, Python source. Some 36 minutes for 0.51M tokens, at the 240 tokens/s that a
# run of 120 updates reached on two cores (study/LOG.md).

methods = ("alra",)
student = "384x6x6"  # vocabulary (49,152), rope base, norm epsilon and context are the teacher's
teacher = "HuggingFaceTB/SmolLM2-135M"  # no commit: NAME@COMMIT pins it; run.json records the one used
data_dir = "data/smollm2"
out_dir = "out/smollm2_30m"

source = "demo/text.jsonl.zst"
n_documents = train_rows = None
val_rows, val_share = 0, 0.02
seq_len = 256

shuffle = True
repeat_rows = True
max_steps = schedule_steps = 500  # * 4 rows * 256 inputs = 0.51M nominal tokens
batch_rows = micro_batch = 4
lr, min_lr = 2e-3, 2e-4
warmup_steps = 50
val_every_steps = 50
val_max_rows = 64
checkpoint_every_steps = 50
compile = True
