"""Messages for misspelled options of a configuration."""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence

from heinsen_jax.runtime.arguments import Given
from heinsen_jax.typing import JSON

COMMAND_OPTIONS = (
    *("config", "workdir", "restart", "allow_change", "dry_run", "profile", "help"),
    *("coordinator", "num_processes", "process_id", "heartbeat_timeout"),
)
"""Options of the command, besides fields."""
OTHER_NAMES = {
    "seed": "random_seed rng_seed rng manual_seed",
    "model.attention": "attn attention_type attn_implementation mechanism mixer",
    "model.dtype": "precision mixed_precision fp16 bf16 amp compute_dtype torch_dtype",
    "model.key_depth": "head_dim d_head d_k",
    "model.max_length": "max_position_embeddings n_positions",
    "model.mlp_dim": "d_ff d_mlp ff_dim ffn_dim intermediate_size mlp_size",
    "model.model_dim": "d_model dim n_embd n_embed hidden_size hidden_dim hidden embed_dim emb_dim "
    "embedding_dim width model_size",
    "model.norm": "normalization norm_type layer_norm",
    "model.norm_epsilon": "eps epsilon norm_eps layer_norm_eps rms_norm_eps",
    "model.num_heads": "heads n_head n_heads num_head num_attention_heads nhead",
    "model.num_layers": "layers n_layer n_layers num_layer num_hidden_layers n_blocks num_blocks "
    "depth",
    "model.remat": "gradient_checkpointing activation_checkpointing grad_checkpointing "
    "checkpointing",
    "model.tie_embeddings": "tie_weights tie_word_embeddings weight_tying",
    "model.vocab_size": "vocab n_vocab vocabulary vocabulary_size",
    "data.batch_size": "bs batch batchsize train_batch_size global_batch_size micro_batch_size "
    "per_device_batch_size per_device_train_batch_size",
    "data.cache": "cache_dir",
    "data.corpus": "dataset dataset_name dataset_path data_path data_dir train_data train_file "
    "file input inputs",
    "data.mixture": "mix data_mix mixing mixture_weights",
    "data.packing": "pack",
    "data.sequence_length": "seq_len seq_length seqlen max_seq_len max_seq_length sequence_len "
    "max_length block_size context_length context_size context_len context_window n_ctx ctx "
    "ctx_len length",
    "data.test_fraction": "test_size test_split test_ratio",
    "data.text_column": "column text_field",
    "data.tokenizer": "tok tokenizer_name tokenizer_path",
    "data.validation_fraction": "val_fraction val_split val_ratio validation_split",
    "optimizer.beta1": "adam_beta1 b1 betas",
    "optimizer.beta2": "adam_beta2 b2",
    "optimizer.clip_norm": "clip grad_clip clip_grad clip_grad_norm max_grad_norm gradient_clip "
    "gradient_clipping gradient_clip_val max_norm",
    "optimizer.ema_decay": "ema use_ema",
    "optimizer.end_learning_rate": "min_lr final_lr end_lr lr_end",
    "optimizer.learning_rate": "lr max_lr peak_lr base_lr learn_rate rate",
    "optimizer.name": "optim optimizer_name opt",
    "optimizer.schedule": "scheduler lr_schedule lr_scheduler lr_scheduler_type",
    "optimizer.warmup_steps": "warmup warm_up warm_up_steps warmup_iters warmup_ratio "
    "num_warmup_steps",
    "optimizer.weight_decay": "wd decay l2",
    "training.accumulation_steps": "grad_accum accum accum_steps accumulate_grad_batches "
    "gradient_accumulation gradient_accumulation_steps grad_accumulation_steps",
    "training.checkpoint_every": "save_every save_steps save_interval save_freq ckpt_every "
    "checkpoint_interval checkpoint_steps",
    "training.evaluate_every": "eval_every eval_steps eval_interval eval_freq val_every "
    "val_check_interval evaluation_steps test_every",
    "training.evaluation_batches": "eval_batches eval_iters val_batches limit_val_batches",
    "training.keep_checkpoints": "keep keep_last max_to_keep save_total_limit",
    "training.log_every": "log_steps logging_steps log_interval log_freq print_every",
    "training.project": "project_name wandb_project",
    "training.sample_prompt": "prompt",
    "training.steps": "max_steps num_steps n_steps train_steps num_train_steps "
    "max_train_steps total_steps iters max_iters num_iters iterations num_iterations updates "
    "num_updates epochs num_epochs num_train_epochs max_epochs",
    "training.trackers": "tracker report_to logger wandb mlflow trackio",
    "mesh.context": "cp sp context_parallel sequence_parallel",
    "mesh.data": "dp ddp data_parallel gpus n_gpus num_gpus devices num_devices",
    "mesh.tensor": "tp tensor_parallel tensor_parallel_size model_parallel",
    "workdir": "output output_dir out out_dir work_dir run_dir save_dir log_dir logdir folder",
    "config": "cfg configuration config_file config_path",
    "restart": "overwrite overwrite_output_dir from_scratch",
}
"""Names of other libraries, by the field or option that they stand for."""
HINTS = {
    "resume continue resume_from_checkpoint checkpoint ckpt": "the same command resumes a run",
    "dropout dropout_rate attention_dropout": "models have no dropout; leave it out",
    "compile torch_compile jit": "updates are always compiled; leave it out",
    "num_kv_heads n_kv_heads window window_size": "give an option of a mechanism with its name, "
    "as in --model.attention gqa:num_kv_heads=2",
    "temperature top_k top_p max_new_tokens": "it is an option of python -m heinsen_jax.generate",
}
OTHER_VALUES = {
    "bf16": "bfloat16",
    "half": "bfloat16",
    "fp32": "float32",
    "float": "float32",
    "fp64": "float64",
    "double": "float64",
    "adam": "adamw",
    "cosine": "one_cycle",
    "onecycle": "one_cycle",
    "weights_and_biases": "wandb",
}
HELP = "--help SECTION lists the fields of a section"
SECTION_FIELDS = {
    "model": "model.attention",
    "data": "data.corpus",
    "optimizer": "optimizer.name",
    "training": "training.steps",
    "mesh": "mesh.data",
    "distillation": "distillation.teacher",
}
"""The fields that the names of sections stand for."""
_FIELDS = {other: name for name, others in OTHER_NAMES.items() for other in others.split()}
_HINTS = {name: hint for names, hint in HINTS.items() for name in names.split()}


def unrecognized(unknown: Sequence[Given], values: Mapping[str, JSON]) -> str:
    """Explain in one line that options are unknown.

    Args:
      unknown: the options.
      values: the fields, as `section.field`, with their values.
    """
    reason = f"Unrecognized options: {', '.join(x for each in unknown for x in each.words)}"
    words = [re.sub(r"[-_]+", "_", x.flag.lstrip("-")).lower() for x in unknown]
    names = dict.fromkeys(flag for word in words for flag in _suggested(word, values))
    if names:
        return f"{reason}; perhaps {' or '.join(names)} is meant"
    hints = (_HINTS.get(word.rpartition(".")[2]) for word in words)
    return f"{reason}; {next(filter(None, hints), HELP)}"


def stray(value: str, values: Mapping[str, JSON]) -> str:
    """The fix for a value without an option."""
    word, equals, rest = value.partition("=")
    if equals and (flags := _suggested(word.lower().replace("-", "_"), values)):
        return f"perhaps {flags[0]} {rest} is meant"
    return "options have the form --section.field VALUE"


def _suggested(word: str, values: Mapping[str, JSON]) -> list[str]:
    """Options that a word may stand for, the most likely ones."""
    word = re.sub(r"is(?=e|ation|ing)", "iz", word.replace(":", "."))  # American spelling
    field = word.removeprefix("no_")
    if word != field and isinstance(values.get(field), bool):
        section, _, name = field.rpartition(".")
        return [f"--{section}.no-{name}".replace("_", "-")]
    names = [*values, *COMMAND_OPTIONS]
    likely = next(filter(None, _candidates(word, names)), [])
    return [f"--{name.replace('_', '-')}" for name in likely]


def _candidates(word: str, names: Sequence[str]) -> Iterator[list[str]]:
    """Lists of names for a word, the most likely first."""
    section, _, field = word.rpartition(".")
    yield [name for name in names if name == SECTION_FIELDS.get(word)]
    yield [name for name in names if name.replace(".", "_") == word.replace(".", "_")]
    yield [name for name in names if name.rpartition(".")[2] == field]
    others = [name for name in names if name == _FIELDS.get(field)]
    others += [name for name in names if field == "betas" and name == "optimizer.beta2"]
    yield others
    if field in _HINTS:
        return
    inside = {x.rpartition(".")[2]: x for x in names if section and x.startswith(f"{section}.")}
    yield [inside[x] for x in difflib.get_close_matches(field, inside, n=1, cutoff=0.6)]
    yield difflib.get_close_matches(word, names, n=1, cutoff=0.8)
    fields = {x.rpartition(".")[2]: x for x in names}
    yield [fields[x] for x in difflib.get_close_matches(field, fields, n=1, cutoff=0.75)]
