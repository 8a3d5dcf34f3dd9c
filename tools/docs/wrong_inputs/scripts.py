"""Mistakes with launch scripts of other frameworks, and with the commands that pack a run and show its alerts."""

from __future__ import annotations

from tools.docs.wrong_inputs.mistake import Mistake, script

SCRIPTS = (
    Mistake("a launch script that is not there", "from-slime rnu.sh"),
    Mistake("a launch script of verl for from-slime", "from-slime run.sh", script("python3 -m verl.trainer.main_ppo")),
    Mistake("a launch script of slime for from-verl", "from-verl run.sh", script("python3 train.py --colocate")),
    Mistake("a launch script of slime for from-trl", "from-trl run.sh", script("python3 train.py --colocate")),
    Mistake("a script that starts nothing", "from-slime run.sh", script("pip install -e .")),
    Mistake("a variable that a script does not set", "from-slime run.sh", script("python3 train.py --save $BASE/x")),
    Mistake("an argument that a script needs", "from-slime run.sh 1=a", script("python3 train.py --save $1/$2")),
    Mistake("a quote that a script never closes", "from-verl run.sh", script('python3 train.py --save "x')),
    Mistake(
        "a loop that a script never closes",
        "from-slime run.sh",
        script("for i in 1 2; do\n  python3 train.py --lr $i"),
    ),
    Mistake("a script without an end", "from-slime run.sh", script("A=x; while true; do A=$A$A; done")),
    Mistake("a script of another train.py", "from-slime run.sh", script("python3 vision/train.py --epochs 3")),
    Mistake("a number in words in a script", "from-slime run.sh", script("python3 train.py --num-rollout ten")),
    Mistake("a configuration of slimx for from-verl", "from-verl run.yaml"),
    Mistake(
        "a configuration that exists", "from-slime run.sh --out run.yaml", script("python3 train.py --hf-checkpoint m")
    ),
    Mistake("a notebook for from-trl", "from-trl grpo.ipynb", {"grpo.ipynb": "{}"}),
    Mistake("a Python file of TRL with an error", "from-trl grpo.py", {"grpo.py": "GRPOConfig(\n"}),
    Mistake("a trainer that slimx does not have", "from-trl run.sh", script("trl kto --model_name_or_path m")),
    Mistake(
        "a switch of verl by an unset variable",
        "from-verl run.sh",
        script("python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.use_kl_loss=$KL"),
    ),
    Mistake("a flag of slime after its script", "from-slime run.sh --colocate", script("python3 train.py")),
    Mistake("a variable without a value", "from-slime run.sh BASE", script("python3 train.py")),
    Mistake("alerts of the YAML file", "alerts run.yaml"),
    Mistake("an archive of the model's directory", "pack model"),
    Mistake("an archive over a file", "pack run.yaml --out run.yaml"),
    Mistake("an archive with all rollouts", "pack run.yaml --rollouts 1000"),
)
