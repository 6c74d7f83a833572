"""`require_separable` over a table of optimizers, and the law: servers do what optax does."""

import itertools

import jax
import numpy as np
import optax
import pytest

from mirror._src.ps import objects
from mirror._src.ps.objects import join_optimizer_state, split_optimizer_state
from mirror._src.ps.placement import FixedShardsPartitioner, place
from mirror._src.ps.separable import place_separably, require_separable, structs
from tests.ps.servers import (
    SHAPES,
    Servers,
    assert_equal_trees,
    leaves_of,
    random_leaves,
    trained_by_optax,
)
from tests.support.messages import assert_message
from tests.support.tables import mostly_nightly


def by_path(path, _):
    return "kernels" if path[-1].key == "kernel" else "others"


def labels(params):
    return jax.tree_util.tree_map_with_path(by_path, params)


def kernels(params):
    return jax.tree.map(lambda label: label == "kernels", labels(params))


def labels_are_others(params):
    return jax.tree.map(lambda label: label == "others", labels(params))


def lr(count):
    return 0.1 / (1 + count)


BITWISE = {
    "sgd": optax.sgd(0.1),
    "schedule": optax.sgd(lr),
    "clip": optax.chain(optax.clip(0.5), optax.sgd(0.1)),
    "lion": optax.lion(1e-2),
}
ACCEPTED = BITWISE | {
    # XLA may fuse these products and sums differently in arrays of other shapes.
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "multi_steps": optax.MultiSteps(optax.sgd(0.1), 2),
    "multi_transform": optax.multi_transform(
        {"kernels": optax.sgd(0.1), "others": optax.sgd(0.2, momentum=0.5)}, labels
    ),
    "adam": optax.adam(1e-2),
    "adamw": optax.adamw(lr, mask=kernels),
    "adagrad": optax.adagrad(0.1),
    "rmsprop": optax.rmsprop(1e-2, momentum=0.9),
    "nadam": optax.nadam(1e-2),
    "amsgrad": optax.amsgrad(1e-2),
    "masked": optax.chain(optax.masked(optax.add_decayed_weights(0.1), kernels), optax.adam(1e-2)),
    "inject": optax.inject_hyperparams(optax.adam)(learning_rate=lr),
    "accumulate": optax.MultiSteps(optax.chain(optax.clip(1.0), optax.adam(1e-2)), 3),
    "schedule_free": optax.contrib.schedule_free_sgd(0.1),
    "ema": optax.chain(optax.ema(0.9), optax.sgd(0.1)),
    "loop": optax.chain(
        optax.stateless_with_tree_map(
            lambda g, _: jax.lax.fori_loop(0, 3, lambda _, x: x - x**3 / 10, g)
        ),
        optax.sgd(0.1),
    ),
}
"""Rows may be on any server."""

WHOLE = {
    "lamb": optax.lamb(1e-2),
    "lars": optax.lars(0.1),
    "fromage": optax.fromage(0.1),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "adaptive_grad_clip": optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1)),
    "zero_nans": optax.chain(optax.zero_nans(), optax.sgd(0.1)),
    "block_rms": optax.chain(optax.clip_by_block_rms(0.5), optax.sgd(0.1)),
    "muon": optax.contrib.muon(1e-2),
    "size": optax.chain(optax.stateless_with_tree_map(lambda g, _: g / g.size), optax.sgd(0.1)),
}
"""Leaves may be on any server, but their rows stay together."""

REFUSED = {
    "global_norm": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
    "finite": optax.apply_if_finite(optax.adam(1e-2), 3),
    "noise": optax.chain(optax.add_noise(0.1, 0.9, 0), optax.sgd(0.1)),
    "normalized": optax.chain(optax.normalize_by_update_norm(), optax.sgd(0.1)),
    "skipping": optax.MultiSteps(optax.sgd(0.1), 2, should_skip_update_fn=optax.skip_not_finite),
    "number": optax.chain(
        optax.stateless(lambda g, _: jax.tree.map(lambda x: x / len(jax.tree.leaves(g)), g)),
        optax.sgd(0.1),
    ),
    "masked_norm": optax.masked(optax.clip_by_global_norm(1.0), labels_are_others),
}


def trained(values):
    return structs(values)


def leaves():
    return leaves_of(random_leaves(0))


def test_nothing_stays_whole_for_optimizers_that_work_by_element(subtests):
    for name in ACCEPTED:
        with subtests.test(msg=name):
            num_ps = 2
            placement = place_separably(ACCEPTED[name], leaves(), num_ps, FixedShardsPartitioner(8))
            assert placement == place(leaves(), num_ps, FixedShardsPartitioner(8))


def test_rows_that_an_optimizer_couples_stay_whole(subtests):
    for name in WHOLE:
        with subtests.test(msg=name):
            placement = place_separably(WHOLE[name], leaves(), 2, FixedShardsPartitioner(8))
            assert not placement.is_cut("layers.0.kernel")
            assert all(placement.servers), "leaves are on both servers"


@pytest.mark.parametrize("names", mostly_nightly(REFUSED, "global_norm", "number"))
def test_optimizers_that_are_other_ones_for_some_leaves_are_refused(names, subtests):
    for name, num_shards in itertools.product(names, [1, 8]):
        with subtests.test(name=name, num_shards=num_shards):
            with pytest.raises(ValueError, match="tx") as raised:
                place_separably(REFUSED[name], leaves(), 2, FixedShardsPartitioner(num_shards))
            assert_message(raised, names="tx", fix=("ps=1", "optimizer.update"))
            assert any(repr(leaf) in str(raised.value) for leaf in SHAPES)


def test_one_server_refuses_nothing(subtests):
    for name in [*REFUSED, *WHOLE]:
        with subtests.test(msg=name):
            tx = (REFUSED | WHOLE)[name]
            placement = place(leaves(), 1, FixedShardsPartitioner(8))
            assert require_separable(tx, trained(random_leaves(0)), placement) == frozenset()


QUICK = ("clip", "multi_transform", "adaptive_grad_clip")


@pytest.mark.parametrize("names", mostly_nightly(ACCEPTED | WHOLE, *QUICK))
def test_servers_compute_what_optax_computes_for_whole_leaves(names, subtests):
    """Also after they are joined, and continued on another number of servers."""
    for name in names:
        with subtests.test(msg=name):
            tx = (ACCEPTED | WHOLE)[name]
            tolerance = 0.0 if name in BITWISE else 2e-6
            values, gradients = random_leaves(0), [random_leaves(seed) for seed in range(1, 6)]
            whole, state = trained_by_optax(tx, values, gradients)
            placements = [
                place_separably(tx, leaves(), num_ps, FixedShardsPartitioner(8))
                for num_ps in (2, 3)
            ]
            servers = Servers(tx, values, placement=placements[0])
            for each in gradients[:2]:
                servers.step(each)
            structs, _ = objects.init_structs(tx, trained(values))
            known = structs, trained(values)
            joined = join_optimizer_state(*known, placements[0], servers.states())
            states = split_optimizer_state(*known, placements[1], joined)
            assert_equal_trees(join_optimizer_state(*known, placements[1], states), joined)
            servers = Servers(tx, servers.values(), placement=placements[1], states=states)
            for each in gradients[2:]:
                servers.step(each)
            got = servers.values()
            for leaf, value in whole.items():
                np.testing.assert_allclose(
                    got[leaf], value, rtol=tolerance, atol=tolerance, err_msg=leaf
                )
            joined = join_optimizer_state(*known, placements[1], servers.states())
            assert_equal_trees(joined, objects.by_path(state), 2e-5 if tolerance else 0.0)
