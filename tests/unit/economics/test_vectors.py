"""All 61 vectors: the answers of an independent generator (50-digit closed forms, numeric maximisation, simulation).

Origin of vectors.json: written by a separate mpmath and numpy program that shares no code with the package; each
vector's optimum was found by a closed form and by brute-force maximisation, and confirmed by Monte Carlo (rms z 1.07).
"""

import json
import math
from dataclasses import astuple
from pathlib import Path

import pytest

from elastic.economics import BadInput, Costs, Job, Rates, Tier, goodput, recommend
from elastic.economics.interval import build_model
from elastic.economics.models import Setting, SingleTier
from elastic.economics.posterior import Posterior, effective_cost_s
from elastic.economics.scale import Scaling
from elastic.economics.silent import Verified, keep_for_late_detection, retention_risk

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text())["vectors"]
PLAIN_MODELS = {
    "sync_exponential",
    "async_exponential",
    "two_level_exponential",
    "preemption_with_notice",
    "silent_errors_verified",
    "weibull_renewal",
    "lognormal_renewal",
    "step_quantised",
    "finite_job",
}


def of(*models, without=()):
    chosen = [v for v in VECTORS if v["model"] in models and v["id"] not in without]
    return pytest.mark.parametrize("v", chosen, ids=[v["id"] for v in chosen])


def inputs(v):
    """The vector's inputs in the words of the package."""
    i, model = v["inputs"], v["model"]
    after = {"reschedule_s": i.get("downtime", 0.0), "load_s": i.get("recovery", 0.0)}
    rates, job = Rates(mtbf_s=i.get("mtbf")) if "mtbf" in i else None, Job()
    if model == "sync_exponential":
        flags = {"strike_save": i["failures_during_save"], "strike_recovery": i["failures_during_recovery"]}
        return Rates(mtbf_s=i["mtbf"], **flags), Costs(stall_s=i["save"], **after), job
    if model == "async_exponential":
        save = {"stall_s": i["stall"], "persist_s": i["persist_latency"], "slowdown": i["slowdown"]}
        modes = {
            "commit": "next-save" if i["commit"] == "lazy" else "eager",
            "in_flight": "many" if i["parallel_uploads"] else "one",
        }
        return rates, Costs(**save, **modes, **after), job
    if model.startswith("two_level"):
        fast = Tier(name="fast", stall_s=i["fast_save"], survives=i["p_fast_survives"], load_s=i["recovery_fast"])
        slow = {
            "stall_s": i.get("slow_save_extra", 0.0),
            "persist_s": i.get("slow_persist_latency", 0.0),
            "load_s": i["recovery_slow"],
        }
        return rates, Costs(**slow, reschedule_s=i["downtime"], tiers=(fast,)), job
    if model == "preemption_with_notice":
        assert (i["downtime_warned"], i["recovery_warned"]) == (i["downtime_unwarned"], i["recovery_unwarned"])
        rates = Rates(mtbf_s=i["mtbf_all"], notice_share=i["p_notice"], strike_recovery=False)
        costs = {
            "notice_save_s": i["save_on_notice"],
            "reschedule_s": i["downtime_warned"],
            "load_s": i["recovery_warned"],
        }
        return rates, Costs(stall_s=i["save"], **costs), job
    if model == "silent_errors_verified":
        rates = Rates(mtbf_s=1 / i["rate_failstop"], silent_mtbf_s=1 / i["rate_silent"])
        return rates, Costs(stall_s=i["save"], verify_s=i["verify"], **after), job
    if model.endswith("renewal"):
        rates = Rates(mtbf_s=i["mean"], shape=i.get("shape"), lognormal_sigma=i.get("sigma"))
        return rates, Costs(stall_s=i["save"], load_s=i["downtime_plus_recovery"]), job
    if model == "step_quantised":
        return rates, Costs(stall_s=i["save"], **after), Job(step_s=i["step_s"], align_steps=i["multiple_of"])
    assert model == "finite_job", model
    return rates, Costs(stall_s=i["save"], **after), Job(work_s=i["work_s"], final_save=i["final_save"])


def test_every_vector_is_used():
    other = {"given_interval", "sync_exponential_random_save", "two_level_async_approximate", "gamma_posterior"}
    assert {v["model"] for v in VECTORS} == PLAIN_MODELS | other | {"scale_wall", "retention_for_late_detection"}
    assert len(VECTORS) == 61


@of(*PLAIN_MODELS, without=("sdc_only_cheap_verify",))  # that one has no fail-stop failures: test_silent_errors_alone
def test_recommend(v):
    plan, want = recommend(*inputs(v)), v["optimum"]
    reached = plan.goodput if v["model"] != "finite_job" else v["inputs"]["work_s"] / plan.expected_total_s
    assert reached == pytest.approx(v["goodput"], abs=1e-9)
    work = want.get("tau_s", want.get("work_interval_s", want.get("pattern_work_s")))
    assert plan.interval_s == pytest.approx(work, rel=1e-9 if "closed_form_s" in v else 1e-3)
    assert sum(astuple(plan.split)) == pytest.approx(1, abs=1e-12)
    assert plan.split.useful == pytest.approx(plan.goodput, abs=1e-12)
    assert min(astuple(plan.split)) >= 0
    if "fast_saves_per_slow" in want or "verifications_per_checkpoint" in want:
        assert plan.parts == (want.get("fast_saves_per_slow", want.get("verifications_per_checkpoint")),)
    if "steps" in want:
        assert plan.steps == want["steps"]
    if "segments" in want:
        assert plan.segments == want["segments"]
        assert plan.expected_total_s == pytest.approx(want["expected_total_s"], rel=1e-9)
    if "bound" in v and v["id"] != "async_parallel_uploads":
        assert plan.bound == v["bound"]


@of("sync_exponential")
def test_goodput_off_the_optimum_and_split(v):
    rates, costs, job = inputs(v)
    best = v["optimum"]["tau_s"]
    assert goodput(rates, costs, job, best / 2) == pytest.approx(v["goodput_at_half"], abs=1e-9)
    assert goodput(rates, costs, job, best * 2) == pytest.approx(v["goodput_at_double"], abs=1e-9)
    if want := v.get("breakdown"):
        split = recommend(rates, costs, job).split
        got = {
            "useful": split.useful,
            "save": split.save,
            "lost_work": split.rework,
            "downtime": split.reschedule,
            "recovery": split.recovery,
        }
        assert got == pytest.approx(want, abs=1e-12)


@of("given_interval")
def test_given_interval(v):
    i = v["inputs"]
    got = goodput(Rates(mtbf_s=i["mtbf"]), Costs(stall_s=i["save"], load_s=i["recovery"]), Job(), i["interval"])
    assert got == pytest.approx(v["goodput"], abs=1e-9)


@of("sync_exponential_random_save")
def test_random_save_cost(v):
    i = v["inputs"]
    save = effective_cost_s([i["save_90pct"]] * 9 + [i["save_10pct"]], i["mtbf"])
    assert save == pytest.approx(v["optimum"]["effective_save_s"], rel=1e-12)
    plan = recommend(Rates(mtbf_s=i["mtbf"]), Costs(stall_s=save, load_s=i["recovery"]))
    assert plan.interval_s == pytest.approx(v["optimum"]["tau_s"], rel=1e-9)
    assert plan.goodput == pytest.approx(v["goodput"], abs=1e-9)


@of("two_level_async_approximate")
def test_background_slow_tier(v):
    rates, costs, _ = inputs(v)
    want = v["optimum"]
    got = build_model(rates, costs, rates.mtbf_s).goodput(
        Setting(want["work_interval_s"], (want["fast_saves_per_slow"],))
    )
    assert got == pytest.approx(v["goodput"], abs=1e-9)
    assert got == pytest.approx(v["mc"]["goodput"], abs=1e-3)


def test_silent_errors_alone():
    v = next(v for v in VECTORS if v["id"] == "sdc_only_cheap_verify")
    i = v["inputs"]
    model = Verified(
        mtbf_s=math.inf,
        silent_mtbf_s=1 / i["rate_silent"],
        verify_s=i["verify"],
        stall_s=i["save"],
        recovery_s=i["recovery"],
    )
    best = model.best(0.0, math.inf)
    assert best.parts == (v["optimum"]["verifications_per_checkpoint"],)
    assert model.goodput(best) == pytest.approx(v["goodput"], abs=1e-9)
    assert sum(astuple(model.split(best))) == pytest.approx(1, abs=1e-12)


@of("gamma_posterior")
def test_posterior(v):
    i, want = v["inputs"], v["optimum"]["tau_s"]
    known = Posterior(i["shape_a"], i["exposure_b_s"], "observed")

    def gain(work, rate):
        return SingleTier(
            mtbf_s=1 / rate, stall_s=i["save"], reschedule_s=i["downtime"], recovery_s=i["recovery"]
        ).goodput(Setting(work))

    best = known.best_work_s(gain, i["save"], known.mtbf_s * 10)
    assert best == pytest.approx(want, rel=1e-3)
    assert known.expected(lambda rate: gain(best, rate)) == pytest.approx(v["goodput"], abs=2e-6)
    assert known.mtbf_range_s() == pytest.approx(tuple(v["mtbf_95_credible_s"]), rel=1e-9)
    plug = SingleTier(mtbf_s=known.mtbf_s, stall_s=i["save"]).best(0, math.inf).work_s
    assert plug == pytest.approx(v["plug_in_mean_rate_s"], rel=1e-9)
    assert v["goodput"] - known.expected(lambda rate: gain(plug, rate)) < 5e-6


@of("scale_wall")
def test_scale(v):
    i, want = v["inputs"], v["optimum"]
    scaling = Scaling(
        rates=Rates(per_1000_node_days=i["failures_per_node_s"] * 86_400_000),
        costs=Costs(
            stall_s=i["save_at_ref"],
            persist_s=i["persist_latency"],
            in_flight="many",
            reschedule_s=i["downtime"],
            load_s=i["recovery"],
        ),
        job=Job(nodes=i["n_ref"]),
        stall_exponent=i["save_scaling_eta"],
    )
    assert scaling.size_where(i["theta"]) == pytest.approx(want["nodes_marginal_theta"], rel=1e-9)
    assert scaling.wall == pytest.approx(want["nodes_wall"], rel=1e-9)
    point = scaling.at(want["nodes_marginal_theta"])
    assert point.goodput == pytest.approx(v["goodput"], abs=1e-9)
    assert point.interval_s == pytest.approx(want["tau_at_theta_s"], rel=1e-9)
    for nodes, row in v["curve"].items():
        point = scaling.at(int(nodes))
        assert (point.goodput, point.marginal) == pytest.approx((row["goodput"], row["marginal"]), abs=1e-9)
        assert point.interval_s == pytest.approx(row["tau_s"], rel=1e-9)


@of("retention_for_late_detection")
def test_retention(v):
    i = v["inputs"]
    keep = keep_for_late_detection(i["interval"], i["mean_detection_latency"], i["risk"])
    assert keep == v["optimum"]["keep"]
    assert retention_risk(i["interval"], i["mean_detection_latency"], keep) == pytest.approx(
        v["risk_at_keep"], abs=1e-12
    )
    with pytest.raises(BadInput, match="between 0 and 1"):
        keep_for_late_detection(1800.0, 3600.0, 0.0)
