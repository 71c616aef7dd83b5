import jax
import jax.numpy as jnp
import numpy as np
import pytest

from heinsen_jax.ops.mla import latent_attention, mla_attention
from heinsen_jax.ops.rotary import rotary

STATIC = ("form", "is_causal", "implementation")
FORMS = ("expanded", "absorbed")
jitted = jax.jit(mla_attention, static_argnames=STATIC)


def draw(length, sources, *, batch=(), heads=2, depth=3, pe_depth=4, rank=6, value_depth=5):
    """query, query_pe, latent, key_pe, key_up, value_up"""
    rng = np.random.default_rng(length)
    shapes = [
        (length, heads, depth),
        (length, heads, pe_depth),
        (sources, rank),
        (sources, pe_depth),
    ]
    arrays = [rng.standard_normal((*batch, *shape)) for shape in shapes]
    shapes = (heads, rank, depth), (heads, rank, value_depth)
    return arrays + [rng.standard_normal(shape) for shape in shapes]


def single(arrays):
    return [x.astype(np.float32) for x in arrays]


def oracle(query, query_pe, latent, key_pe, key_up, value_up, *, is_causal):
    """Definition for one batch entry, query by query."""
    y = np.zeros((*query.shape[:2], value_up.shape[-1]))
    for t, n in np.ndindex(*query.shape[:2]):
        scores, values = [], []
        for s in range(t + 1 if is_causal else len(latent)):
            score = query[t, n] @ (latent[s] @ key_up[n]) + query_pe[t, n] @ key_pe[s]
            scores.append(score / np.sqrt(query.shape[-1] + query_pe.shape[-1]))
            values.append(latent[s] @ value_up[n])
        weights = np.exp(np.array(scores) - max(scores))
        y[t, n] = weights @ np.array(values) / weights.sum()
    return y


def normalized(x, weight):
    x = x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
    return x * weight.reshape((1,) * (x.ndim - 1) + weight.shape)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("form", FORMS)
def test_published_values(golden, form):
    """The published rotation uses float32."""
    case = golden("mla")
    _, heads, _, rank, depth, pe_depth, _ = (int(x) for x in case["config"])
    parameters = {k.removeprefix("param/"): x for k, x in case.items() if k.startswith("param/")}
    positions = np.arange(case["x"].shape[1])

    def project(x, name):
        return jnp.einsum("btd,ed->bte", x, parameters[f"{name}.weight"])

    @jax.jit
    def layer(x):
        query = project(normalized(project(x, "wq_a"), parameters["q_norm.weight"]), "wq_b")
        query = query.reshape(*x.shape[:-1], heads, depth + pe_depth)
        both = project(x, "wkv_a")
        latent = normalized(both[..., :rank], parameters["kv_norm.weight"])
        key_pe = rotary(both[..., None, rank:], positions)[..., 0, :]
        query_pe = rotary(query[..., depth:], positions)
        up = parameters["wkv_b.weight"].reshape(heads, -1, rank)
        up = jnp.swapaxes(up, 1, 2)
        y = mla_attention(
            query[..., :depth],
            query_pe,
            latent,
            key_pe,
            up[..., :depth],
            up[..., depth:],
            form=form,
            is_causal=True,
            scale=float(case["softmax_scale"]),
        )
        return project(y.reshape(*x.shape[:-1], -1), "wo"), latent, key_pe

    out, latent, key_pe = layer(case["x"])
    name = {"expanded": "out_naive", "absorbed": "out_absorb"}[form]
    np.testing.assert_allclose(out, case[name], rtol=0, atol=1e-7)
    np.testing.assert_allclose(latent, case["kv_cache"], rtol=0, atol=1e-10)
    np.testing.assert_allclose(key_pe, case["pe_cache"], rtol=0, atol=5e-7)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("length", "sources"), [(7, 19), (63, 63)])
def test_both_forms_by_the_definition(length, sources, is_causal):
    arrays = draw(length, length if is_causal else sources)
    expected = oracle(*arrays, is_causal=is_causal)
    outputs = [jitted(*arrays, form=form, is_causal=is_causal) for form in FORMS]
    for y, form in zip(outputs, FORMS, strict=True):
        np.testing.assert_allclose(y, expected, rtol=0, atol=1e-11)
        in_float32 = jitted(*single(arrays), form=form, is_causal=is_causal)
        assert in_float32.dtype == jnp.float32
        np.testing.assert_allclose(in_float32, expected, rtol=0, atol=5e-5)
    np.testing.assert_allclose(*outputs, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("x64")
def test_both_forms_have_the_gradients_of_finite_differences():
    arrays = draw(5, 5, batch=(2,))

    @jax.jit
    def total(arrays):
        return jnp.stack([jnp.sum(jnp.sin(mla_attention(*arrays, form=form))) for form in FORMS])

    gradients = jax.jit(jax.jacrev(total))(arrays)
    rng = np.random.default_rng(0)
    for index, (expanded, absorbed) in enumerate(gradients):
        np.testing.assert_allclose(expanded, absorbed, rtol=0, atol=1e-11)
        step = 1e-5 * rng.standard_normal(arrays[index].shape)
        moved = [
            [*arrays[:index], arrays[index] + sign * step, *arrays[index + 1 :]] for sign in (1, -1)
        ]
        expected = (total(moved[0]) - total(moved[1]))[0] / 2
        np.testing.assert_allclose(np.sum(expanded * step), expected, rtol=1e-6, atol=1e-13)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("form", FORMS)
def test_decoding_from_a_cache_of_latents(form):
    arrays = draw(9, 9, batch=(2,))
    query, query_pe, latent, key_pe, *up = arrays
    whole = jitted(*arrays, is_causal=True)
    valid = np.arange(12)[None, :, None] < 9
    cached = [np.where(valid, np.pad(x, ((0, 0), (0, 3), (0, 0))), 7.0) for x in (latent, key_pe)]
    for start, end in ((0, 4), (4, 5), (5, 9)):
        tokens = np.s_[:, start:end]
        y = jitted(
            query[tokens], query_pe[tokens], *cached, *up,
            form=form, is_causal=True, query_offset=start,
        )  # fmt: skip
        np.testing.assert_allclose(y, whole[tokens], rtol=0, atol=1e-12)


@pytest.mark.usefixtures("x64")
def test_attention_to_latents_by_hand():
    query, query_pe, latent, key_pe, key_up, value_up = draw(5, 8)
    folded = np.einsum("tnk,nrk->tnr", query, key_up)
    read = latent_attention(folded, query_pe, latent, key_pe, scale=7**-0.5)
    y = np.einsum("tnr,nrv->tnv", read, value_up)
    arrays = query, query_pe, latent, key_pe, key_up, value_up
    np.testing.assert_allclose(y, oracle(*arrays, is_causal=False), rtol=0, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_queries_without_keys_are_zero(form):
    y = jitted(*single(draw(3, 0)), form=form)
    np.testing.assert_array_equal(y, np.zeros((3, 2, 5)))


def without(index, x):
    arrays = single(draw(4, 4))
    arrays[index] = x
    return arrays


ZEROS = np.zeros((4, 2, 6, 7), np.float32)


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        (without(0, ZEROS[0, 0, 0]), {}, "query must be"),
        (without(1, ZEROS[:, :, 0, :3]), {}, "key_pe must have shape"),
        (without(1, ZEROS[:3, :, 0, :4]), {}, "query_pe must have shape"),
        (without(3, ZEROS[:3, 0, 0, :4]), {}, "key_pe must have shape"),
        (without(4, ZEROS[0, :, :5, :3]), {}, "key_up must have shape"),
        (without(5, ZEROS[0, :, :5, :3]), {}, "value_up must have shape"),
        (without(2, ZEROS[:, 0, 0, :6].astype(int)), {}, "floating"),
        (single(draw(4, 4)), {"form": "folded"}, "form must be"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_invalid_arguments_raise(arrays, options, message):
    with pytest.raises(ValueError, match=message):
        mla_attention(*arrays, **options)
