"""A few random plans for compute-sanitizer to watch, packed and compared: `python -m tests.gpu.sanitized`."""

import torch

from tests.gpu.plans import FORMS, random_plan
from tests.gpu.running import on_cpu, on_gpu


def main() -> None:
    for number, form in enumerate(FORMS):
        plan = random_plan(number, forms=[form], tensors=3, side=150)
        on_gpu(plan, torch.device("cuda", 0)).must_equal(on_cpu(plan), plan.pieces)
    print("all plans are equal", flush=True)


if __name__ == "__main__":
    main()
