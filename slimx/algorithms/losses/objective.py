"""The loss of the configured algorithm."""

from __future__ import annotations

from slimx.algorithms.hooks import load_loss
from slimx.algorithms.inputs import Loss
from slimx.algorithms.losses import surrogates
from slimx.algorithms.losses.corrections import correction, rejection
from slimx.algorithms.losses.kl import ESTIMATORS
from slimx.algorithms.losses.policy import policy_loss, sft_loss
from slimx.algorithms.losses.surrogates import Surrogate
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
        correction=correction(weigh.kind, level=weigh.level, low=weigh.low, high=weigh.high) if weigh.active else None,
        rejection=(
            rejection(level=reject.level, low=reject.low, high=reject.high, veto=reject.veto) if reject.active else None
        ),
        opsm_delta=algorithm.opsm_delta,
    )


def make_surrogate(algorithm: Algorithm) -> Surrogate:
    """The objective that a configured algorithm's policy gradient maximises."""
    bounds = {"low": algorithm.clip_low, "high": algorithm.clip_high}
    match algorithm.loss:
        case "clip":
            return surrogates.clip(**bounds, dual=algorithm.dual_clip)
        case "gspo":
            return surrogates.gspo(**bounds)
        case "cispo":
            return surrogates.cispo(**bounds)
        case "topr":
            return surrogates.topr()
        case "sapo":
            return surrogates.sapo(tau_positive=algorithm.sapo_tau_positive, tau_negative=algorithm.sapo_tau_negative)
        case "clip_cov":
            return surrogates.clip_cov(**bounds)
        case "kl_cov":
            return surrogates.kl_cov(coef=algorithm.cov_kl_coef)
        case "plain":
            return surrogates.plain()
    raise AssertionError(f"no surrogate is called {algorithm.loss}")
