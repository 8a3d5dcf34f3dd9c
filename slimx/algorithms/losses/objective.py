"""The loss of the configured algorithm."""

from __future__ import annotations

from functools import partial

from slimx.algorithms.hooks import load_loss
from slimx.algorithms.inputs import Loss
from slimx.algorithms.losses import surrogates
from slimx.algorithms.losses.corrections import correction, rejection
from slimx.algorithms.losses.kl import ESTIMATORS
from slimx.algorithms.losses.policy import policy_loss, sft_loss
from slimx.algorithms.losses.surrogates import Surrogate
from slimx.algorithms.losses.top_kl import DIRECTIONS
from slimx.config.sections.algorithm import Algorithm


def make_loss(algorithm: Algorithm) -> Loss:
    """The loss function of a configured algorithm."""
    if algorithm.loss == "sft":
        return sft_loss
    if algorithm.own_loss:
        return load_loss(algorithm.loss)
    weigh, reject = algorithm.correction, algorithm.rejection
    return policy_loss(
        make_surrogate(algorithm),
        kl_coef=algorithm.kl_coef,
        kl=ESTIMATORS[algorithm.kl_estimator],
        kl_unbiased=algorithm.kl_unbiased,
        entropy_coef=algorithm.entropy_coef,
        teacher_coef=algorithm.teacher_coef,
        teacher_kl_coef=algorithm.teacher_kl_coef,
        teacher_kl=DIRECTIONS[algorithm.teacher_kl],
        correction=partial(correction, **dict(weigh)) if weigh.active else None,
        rejection=partial(rejection, **dict(reject)) if reject.active else None,
        opsm_delta=algorithm.opsm_delta,
    )


def make_surrogate(algorithm: Algorithm) -> Surrogate:
    """The objective that a configured algorithm's policy gradient maximises."""
    bounds = {"low": algorithm.clip_low, "high": algorithm.clip_high}
    own: dict[str, Surrogate] = {
        "clip": partial(surrogates.clip, **bounds, dual=algorithm.dual_clip),
        "gspo": partial(surrogates.gspo, **bounds),
        "cispo": partial(surrogates.cispo, **bounds),
        "topr": surrogates.topr,
        "sapo": partial(
            surrogates.sapo, tau_positive=algorithm.sapo_tau_positive, tau_negative=algorithm.sapo_tau_negative
        ),
        "clip_cov": partial(surrogates.clip_cov, **bounds),
        "kl_cov": partial(surrogates.kl_cov, coef=algorithm.cov_kl_coef),
        "plain": surrogates.plain,
    }
    return own[algorithm.loss]
