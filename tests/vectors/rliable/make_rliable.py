"""Numbers of rliable for given scores: `python make_rliable.py > rliable.json`, with rliable 1.2.0 and arch."""

import json

import numpy as np
from rliable import library, metrics

RESAMPLES = 200
random = np.random.default_rng(0)
scores = {
    "first": np.round(random.normal(1.0, 1.0, (5, 3)), 2),
    "second": np.round(random.normal(0.5, 1.0, (7, 3)), 2),
    "third": np.round(random.normal(0.5, 1.0, (5, 3)), 1),
}
scores["third"][0] = scores["first"][0]  # ties
thresholds = np.linspace(-1, 3, 9)


def plain(found):
    return {name: np.asarray(value).tolist() for name, value in found.items()}


profiles, profile_intervals = {}, {}
means, mean_intervals = {}, {}
improvements, improvement_intervals = {}, {}
for name, one in scores.items():
    np.random.seed(0)
    found = library.create_performance_profile({name: one}, thresholds, reps=RESAMPLES)
    profiles |= found[0]
    profile_intervals |= found[1]
    np.random.seed(0)
    found = library.get_interval_estimates({name: one}, lambda x: np.array([metrics.aggregate_iqm(x)]), reps=RESAMPLES)
    means |= found[0]
    mean_intervals |= found[1]
    for other, two in scores.items():
        if other != name:
            np.random.seed(0)
            pair = {f"{name},{other}": (one, two)}
            found = library.get_interval_estimates(
                pair, lambda x, y: np.array([metrics.probability_of_improvement(x, y)]), reps=RESAMPLES
            )
            improvements |= found[0]
            improvement_intervals |= found[1]
print(
    json.dumps(
        {
            "resamples": RESAMPLES,
            "scores": plain(scores),
            "thresholds": thresholds.tolist(),
            "profiles": plain(profiles),
            "profile_intervals": plain(profile_intervals),
            "interquartile_means": plain(means),
            "interquartile_mean_intervals": plain(mean_intervals),
            "improvements": plain(improvements),
            "improvement_intervals": plain(improvement_intervals),
        }
    )
)
