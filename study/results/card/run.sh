# Train the teacher and the students of config.py. The same command resumes.
#
#   sh study/results/card/run.sh [--key=value ..]
#
# The card needs torch and transformers alone, as the rows are prepared elsewhere:
#
#   python demo/make.py text && python prepare.py config/demo_teacher.py && python prepare.py study/small.py
#   tar -cJf rows.tar.xz data/demo data/demo_teacher     about 25 MB; tar -xJf rows.tar.xz on the card
#
# Each student's log.jsonl ends with its figures over the held-out rows. A rehearsal on a CPU:
#
#   sh study/results/card/run.sh --device=cpu --compile=False --student=mini --max_steps=2 --schedule_steps=2 \
#       --warmup_steps=1 --val_max_rows=4 --batch_rows=2 --micro_batch=2 --group=1

set -e
# 34.2M parameters; 82M tokens in 2.1 passes over its own text
shape='{"hidden_size": 512, "num_hidden_layers": 10, "num_attention_heads": 8, "vocab_size": 4096}'
python3 train.py config/demo_teacher.py --student="$shape" --batch_rows=64 --micro_batch=64 --group=64 \
    --max_steps=5000 --schedule_steps=5000 --lr=1e-3 --repeat_rows=True --out_dir=out/card/teacher "$@"
train() { # a run of five students
    seed=$1
    shift
    python3 train.py study/small.py study/results/card/config.py --seed=$seed --out_dir=out/card/seed$seed "$@"
}
train 1 "$@" & # both together, as a card waits for the host at this size
train 2 "$@"
wait $!
