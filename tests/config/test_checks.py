"""Errors for impossible settings, with the setting's name."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.checks import check
from skyrl_mega.config.compose import compose


@pytest.mark.parametrize(
    "arguments",
    [
        ["run.steps=0"],
        ["policy.optimizer.schedule=cosine", "policy.optimizer.decay_steps=10", "policy.optimizer.warmup_steps=9"],
        ["algorithm.advantage=reinforce", "data.samples_per_prompt=1", "rollout.sampling.temperature=0"],
        ["algorithm.kl.coefficient=0.1", "reference.layout.tensor=2", "reference.ranks=2"],
        ["algorithm.advantage=gae", "data.samples_per_prompt=1", "critic.layout.tensor=2", "critic.warmup_steps=3"],
        ["algorithm.advantage=gae", "algorithm.gamma=0.9", "algorithm.whiten=batch"],
        ["rollout.sampling.top_k=1", "rollout.sampling.top_p=0.5", "evaluation.temperature=0"],
        ["cluster.device=cuda", "cluster.nodes=2"],
        ["data.mini_batch_prompts=16"],
        ["policy.fusions=[]", "policy.recompute=moe"],
        ["policy.recompute=selective", "cluster.device=cuda", "cluster.nodes=2"],
        ["policy.fusions=[rope,permute]", "policy.moe.aux_loss=0.1", "cluster.device=cuda", "cluster.nodes=2"],
        ["policy.moe.dispatcher=deepep", "policy.layout.expert=2", "cluster.device=cuda", "cluster.nodes=2"],
        ["rollout.options.quantization=fp8_per_block", "weights.wire=fp8"],
        [
            "rollout.options={quantization: fp8, hf_overrides: {quantization_config: {quant_method: fp8, "
            "activation_scheme: dynamic, weight_block_size: [128, 128]}}}",
            "weights.wire=fp8",
        ],
        ["residency.keep=[engine_weights,kv_cache]", "rollout.options.enable_lora=true"],
        ["residency.keep=[parameters,gradients]", "policy.ddp_options.nccl_ub=true"],
        ["policy.options.recompute_granularity=selective", "policy.ddp_options.bucket_size=1000"],
    ],
)
def test_what_is_possible_passes(base: Path, arguments: list[str]) -> None:
    check(compose(base, arguments))


WRONG = [
    ("policy.recompute=maybe", "policy.recompute = maybe: allowed is one of none, selective, moe, full"),
    ("policy.fusions=[norm]", "policy.fusions = [norm]: allowed is a list of rope, permute, router, swiglu or null"),
    (
        "policy.fusions=[rope]",
        "policy.fusions = [rope]: they are kernels of Transformer Engine's layers, and cluster.de",
    ),
    (
        "policy.fusions=[rope] policy.spec=local cluster.device=cuda cluster.nodes=2",
        "policy.fusions = [rope]: they are kernels of Transformer Engine's layers, and policy.spec is local; leave it",
    ),
    (
        "policy.fusions=[rope,router] policy.moe.aux_loss=0.1 cluster.device=cuda cluster.nodes=2",
        "policy.fusions = [rope, router]: a fused router chooses by itself, and policy.moe.aux_loss=0.1 needs",
    ),
    (
        "policy.recompute=selective",
        "policy.recompute = selective: megatron-core recomputes such parts of Transformer E",
    ),
    ("policy.moe.dispatcher=nvshmem", "policy.moe.dispatcher = nvshmem: allowed is one of alltoall, deepep"),
    (
        "policy.moe.dispatcher=deepep",
        "policy.moe.dispatcher = deepep: it has kernels for CUDA alone, and cluster.device",
    ),
    (
        "policy.moe.dispatcher=deepep cluster.device=cuda cluster.nodes=2 model.dtype=float32",
        "policy.moe.dispatcher = deepep: it sends bfloat16, and model.dtype is float32; give",
    ),
    (
        "policy.options.moe_enable_deepep=true",
        "policy.options.moe_enable_deepep: the run decides it; use policy.moe.dis",
    ),
    ("policy.layout.first_stage_layers=0", "policy.layout.first_stage_layers = 0: allowed is a whole number of at"),
    ("cluster.topology.nic_gb_s=0", "cluster.topology.nic_gb_s = 0.0: allowed is a number of at least 0.001"),
    (
        "cluster.topology.nics_per_node=9",
        "cluster.topology.nics_per_node = 9: allowed is at most cluster.gpus_per_node",
    ),
    (
        "cluster.device=cuda cluster.shared=true policy.ranks=8 rollout.engines=9",
        "rollout.engines = 9: with cluster.shared the workers of all engines have GPUs of policy ranks, and "
        "these are 9 workers, more than policy.ranks = 8; allowed is at most 8 engines",
    ),
    (
        "cluster.device=cuda cluster.shared=true cluster.gpus_per_node=4 cluster.nodes=3 rollout.tensor=3",
        "rollout.tensor = 3: with cluster.shared an engine has the GPUs of consecutive policy ranks, and some would "
        "lie in two nodes; allowed are divisors of cluster.gpus_per_node = 4",
    ),
    (
        "cluster.device=cuda rollout.tensor=4 rollout.options.data_parallel_size=4 cluster.nodes=4",
        "rollout.options.data_parallel_size = 4: with rollout.tensor = 4 an engine has 16 GPUs, and in a run an engine "
        "must fit into a node of cluster.gpus_per_node = 8; allowed is at most 2",
    ),
    (
        "rollout.options.pipeline_parallel_size=2",
        "rollout.options.pipeline_parallel_size = 2: a weight sync plans tensor and data parallel workers, not stages",
    ),
    (
        "cluster.device=cuda cluster.shared=true cluster.pools.engines.nodes=2",
        "cluster.shared = true: colocated engines are on the policy's GPUs, and cluster.pools.engines has nodes of its",
    ),
    (
        "cluster.pools.engines.label=engines",
        "cluster.pools.engines.label = engines: allowed is key=value of letters, digits and inner -, _ and ., such as",
    ),
    (
        "cluster.pools.engines.label=pool=in(a,b)",
        "cluster.pools.engines.label = pool=in(a,b): allowed is key=value of letters",
    ),
    (
        "rollout.engines=0 rollout.endpoints=[{url:'http://127.0.0.1:1'}] cluster.pools.engines.nodes=1",
        "rollout.engines = 0: no engine of the run uses the nodes of cluster.pools.engines; give",
    ),
    (
        "cluster.pools.engines.gpus_per_node=4 cluster.pools.engines.nics_per_node=8",
        "cluster.pools.engines.nics_per_node = 8: allowed is at most cluster.pools.engines.gpus_per_node = 4",
    ),
    ("cluster.pools.engines.gpu=RTX", "cluster.pools.engines.gpu = RTX: allowed is one of H100, H200, H20"),
    (
        "cluster.device=cuda cluster.pools.engines.nodes=1 rollout.engines=9",
        "rollout.engines = 9: with rollout.tensor = 1 they need 9 GPUs, more than cluster.pools.engines.nodes",
    ),
    (
        "cluster.device=cuda cluster.pools.engines.gpus_per_node=4 rollout.tensor=8",
        "rollout.tensor = 8: allowed is at most cluster.pools.engines.gpus_per_node = 4",
    ),
    (
        "rollout.options.mamba_ssm_cache_dtype=bfloat16",
        "rollout.options.mamba_ssm_cache_dtype: the run decides it; leave it out",
    ),
    ("rollout.options.enable_eplb=true", "rollout.options.enable_eplb: vLLM would give a worker other experts than"),
    (
        "rollout.options.data_parallel_rank=0",
        "rollout.options.data_parallel_rank: the run decides it; use rollout.options.data_parallel_size, and rollout",
    ),
    ("rollout.options.data_parallel_size=x", "rollout.options.data_parallel_size = x: allowed is a whole number"),
    ("policy.layout.tensor=0", "policy.layout.tensor = 0: allowed is a whole number of at least 1"),
    ("policy.optimizer.lr=nan", "policy.optimizer.lr = nan: allowed is a number of at least 0"),
    ("policy.optimizer.lr=inf", "policy.optimizer.lr = inf: allowed is a number of at least 0"),
    ("policy.optimizer.lr=-1", "policy.optimizer.lr = -1.0: allowed is a number of at least 0"),
    ("algorithm.clip_low=1.5", "algorithm.clip_low = 1.5: allowed is a number from 0 to 1"),
    (
        "rollout.chat_template_options.tokenize=true",
        "rollout.chat_template_options.tokenize: the run decides it; leave",
    ),
    ("rollout.chat_template_options.tools=[]", "tools: the run decides it; use an environment with tools"),
    ("rollout.chat_template_options={1a:1}", "1a: allowed is the name of a template's variable"),
    ("rollout.chat_template_options=[1]", "rollout.chat_template_options"),
    ("evaluation.max_tokens=100000", "evaluation.max_tokens = 100000: allowed is at most"),
    ("evaluation.top_p=2", "evaluation.top_p = 2.0: allowed is a number from 0 to 1 or null"),
    ("cluster.device=gpu", "cluster.device = gpu: allowed is one of auto, cpu, cuda"),
    ("weights.wire=int4", "weights.wire = int4: allowed is one of auto, fp8"),
    ("model.build.experts=-1", "model.build.experts = -1: allowed is a whole number of at least 0"),
    ("run.name=a/b", "run.name = a/b: allowed are letters, digits"),
    ("run.name=..", "run.name = ..: allowed are letters, digits"),
    ('model.path=""', "model.path is not set: allowed is a Hugging Face directory"),
    ("model.build.experts=0", "model.build.experts = 0: qwen3_moe needs at least 1; or architecture=qwen3"),
    (
        "model.build.experts_per_token=9",
        "model.build.experts_per_token = 9: allowed is at most model.build.experts = 8",
    ),
    ("warmup.steps=5", "warmup.steps = 5: it needs warmup.files"),
    ("policy.optimizer.schedule=cosine", "schedule = cosine: it needs policy.optimizer.decay_steps"),
    (
        "policy.optimizer.schedule=linear policy.optimizer.decay_steps=5 policy.optimizer.warmup_steps=5",
        "policy.optimizer.decay_steps = 5: allowed is more than policy.optimizer.warmup_steps = 5",
    ),
    ("policy.optimizer.min_lr=1", "policy.optimizer.min_lr = 1: allowed is at most policy.optimizer.lr = 1e-06"),
    ("policy.optimizer.beta1=1", "policy.optimizer.beta1 = 1: allowed is a number below 1"),
    ("data.train=[]", "data.train is empty: allowed is a list of parquet files"),
    ("data.mini_batch_prompts=24", "data.mini_batch_prompts = 24: it does not divide data.prompts_per_step = 64"),
    ("data.mini_batch_prompts=128", "data.mini_batch_prompts = 128: it does not divide data.prompts_per_step = 64"),
    ("data.samples_per_prompt=1", "data.samples_per_prompt = 1: algorithm.advantage=grpo compares the samples"),
    ("algorithm.importance_cap=0", "algorithm.importance_cap = 0: every token's weight would be 0"),
    ("algorithm.loss_mean=constant", "algorithm.loss_mean = constant: it needs algorithm.loss_mean_length"),
    ("algorithm.loss=sapo algorithm.dual_clip=3", "algorithm.dual_clip = 3: algorithm.loss=sapo has no such bound"),
    ("algorithm.kl.unbiased=true", "algorithm.kl.unbiased = true: there is no KL term to correct"),
    ("algorithm.importance_level=sequence", "algorithm.importance_level = sequence: there is no importance sampling"),
    ("algorithm.entropy.target=0.3 algorithm.entropy.step=0", "algorithm.entropy.step = 0: the coefficient would not"),
    (
        "algorithm.entropy.target=0.3 algorithm.entropy.coefficient=2",
        "algorithm.entropy.coefficient = 2: with algorithm.entropy.target allowed is a number from",
    ),
    (
        "algorithm.entropy.target=0.3 algorithm.entropy.most=0",
        "algorithm.entropy.least = 0: allowed is a number below algorithm.entropy.most = 0",
    ),
    (
        "algorithm.entropy.target=0.3 algorithm.entropy.least=0.5 algorithm.entropy.most=0.1",
        "algorithm.entropy.least = 0.5: allowed is a number below algorithm.entropy.most = 0.1",
    ),
    ("algorithm.entropy.target=0.3 algorithm.entropy.least=0.1", "algorithm.entropy.coefficient = 0: with algorithm"),
    ("algorithm.entropy.top_share=0", "algorithm.entropy.top_share = 0: no token would be learned from"),
    ("algorithm.importance_normalize=true", "algorithm.importance_normalize = true: there is no importance sampling"),
    ("algorithm.clip_cov.low=6", "algorithm.clip_cov.low = 6: allowed is a number below algorithm.clip_cov.high = 5"),
    ("algorithm.loss=kl_cov", "algorithm.loss = kl_cov: the only optimizer step of an RL step would punish nothing"),
    (
        "algorithm.advantage=reinforce algorithm.whiten=group data.samples_per_prompt=1",
        "data.samples_per_prompt = 1: algorithm.whiten=group would bring the only sample of each prompt to 0",
    ),
    (
        "algorithm.loss=kl_cov data.epochs_per_step=2 algorithm.kl_cov.coefficient=0",
        "algorithm.kl_cov.coefficient = 0: kl_cov would punish nothing",
    ),
    ("algorithm.importance_outside=mask", "algorithm.importance_outside = mask: there is no importance sampling"),
    ("algorithm.importance_floor=0.5", "algorithm.importance_floor = 0.5: there is no importance sampling"),
    (
        "algorithm.importance_floor=2 algorithm.importance_cap=2",
        "algorithm.importance_floor = 2: allowed is a number below algorithm.importance_cap = 2",
    ),
    (
        "algorithm.old_logprobs=engine algorithm.importance_cap=2",
        "algorithm.importance_cap = 2.0: its ratio is 1 with algorithm.old_logprobs=engine",
    ),
    (
        "algorithm.old_logprobs=engine algorithm.rejection.level=token",
        "algorithm.rejection.level = token: its ratio is 1 with algorithm.old_logprobs=engine",
    ),
    (
        "algorithm.old_logprobs=engine algorithm.rejection.outlier_low=0.1",
        "algorithm.rejection.outlier_low = 0.1: its ratio is 1 with algorithm.old_logprobs=engine",
    ),
    ("algorithm.loss=dppo_tv algorithm.dual_clip=3", "algorithm.loss=dppo_tv has no such bound"),
    (
        "algorithm.kl.coefficient=0.1 algorithm.kl.unbiased=true algorithm.kl.estimator=k2",
        "algorithm.kl.estimator=k2 times π / π_old does not have the gradient of KL; allowed is k1 or k3",
    ),
    ("algorithm.advantage=maxrl algorithm.overlong.buffer=9", "its punishment makes rewards negative, which"),
    ("algorithm.gamma=0.9", "algorithm.gamma = 0.9: algorithm.advantage=grpo does not discount, so"),
    ("algorithm.whiten=batch_std", "algorithm.whiten = batch_std: algorithm.advantage=grpo already divides by"),
    ("algorithm.advantage=gdpo algorithm.overlong.buffer=9", "looks at each of the environment's rewards, which the"),
    ("algorithm.kl.where=reward", "algorithm.kl.where = reward: algorithm.kl.coefficient = 0 subtracts nothing"),
    ("algorithm.kl.target=3", "algorithm.kl.target = 3: the coefficient of a KL term in the loss is fixed"),
    (
        "algorithm.kl.where=reward algorithm.kl.coefficient=0.1 algorithm.kl.unbiased=true",
        "algorithm.kl.unbiased = true: it belongs to a KL term in the loss",
    ),
    (
        "algorithm.kl.where=reward algorithm.kl.coefficient=0.1 algorithm.advantage=maxrl",
        "algorithm.advantage=maxrl divides by rewards, which KL makes negative",
    ),
    (
        "algorithm.kl.where=reward algorithm.kl.coefficient=0.1 algorithm.old_logprobs=engine",
        "which algorithm.old_logprobs=engine does not compute",
    ),
    ("algorithm.dual_clip=1", "algorithm.dual_clip = 1: it would halve the gradient"),
    ("rollout.sampling.temperature=0", "rollout.sampling.temperature = 0: the 8 samples of a prompt would all be the"),
    (
        "algorithm.kl.coefficient=0.1 warmup.steps=5 warmup.files=[x]",
        "the reference would be the model before its warm-up",
    ),
    ("critic.ranks=2", "critic.ranks is set: algorithm.advantage=grpo has no critic; give algorithm.advantage=gae"),
    ("critic.optimizer.lr=1", "critic.optimizer is set: algorithm.advantage=grpo has no critic"),
    ("critic.warmup_steps=1 algorithm.advantage=rloo", "critic.warmup_steps is set: algorithm.advantage=rloo has no"),
    (
        "algorithm.advantage=opo algorithm.gamma=0.9",
        "give algorithm.gamma=1, or algorithm.advantage=reinforce++ or gae",
    ),
    (
        "algorithm.advantage=optimal_token_baseline data.samples_per_prompt=1",
        "algorithm.advantage=optimal_token_baseline compares the samples",
    ),
    ("algorithm.gae.lam=1", "algorithm.gae.lam is set: algorithm.advantage=grpo has no critic"),
    ("algorithm.advantage=gae critic.value_clip=0", "critic.value_clip = 0: no value could move; allowed is a number"),
    ("algorithm.advantage=gae critic.warmup_steps=9 run.steps=9", "allowed is less than run.steps = 9"),
    ("algorithm.advantage=gae critic.optimizer.beta1=1", "critic.optimizer.beta1 = 1: allowed is a number below 1"),
    (
        "algorithm.advantage=gae critic.optimizer.options.lr=1",
        "critic.optimizer.options.lr: the run decides it; use critic.optimizer.lr",
    ),
    (
        "algorithm.advantage=gae critic.ranks=9 cluster.device=cuda cluster.nodes=2",
        "policy 8 + critic 9 + engines 1 GPUs are more than cluster.nodes · gpus_per_node = 16",
    ),
    (
        "algorithm.advantage=gae cluster.device=cuda policy.ranks=null rollout.engines=2",
        "at most 8: policy.ranks=3, or",
    ),
    ("algorithm.advantage=gae cluster.device=cuda policy.ranks=5 rollout.engines=2", "at most 8: policy.ranks=3, or"),
    ("algorithm.advantage=gae cluster.device=cuda critic.ranks=2 rollout.engines=2", "at most 8: policy.ranks=4, or"),
    (
        "algorithm.kl.coefficient=0.1 reference.layout.tensor=1 cluster.device=cuda rollout.engines=2",
        "policy 8 + reference 8 + engines 2 GPUs are more than cluster.nodes · gpus_per_node = 8; allowed is a sum of "
        "at most 8: policy.ranks=3, or",
    ),
    ("reference.path=x", "reference.path is set: it needs algorithm.kl.coefficient above 0"),
    ("reference.ranks=2 algorithm.kl.coefficient=0.1", "reference.ranks = 2: it needs reference.layout"),
    (
        "algorithm.dynamic_sampling.mode=replace",
        "algorithm.dynamic_sampling.mode = replace: there is no dynamic sampling",
    ),
    ("algorithm.dynamic_sampling.oversample=2", "algorithm.dynamic_sampling.oversample = 2.0: there is no dynamic"),
    ("algorithm.dynamic_sampling.tolerance=0.1", "algorithm.dynamic_sampling.tolerance = 0.1: there is no dynamic"),
    ("algorithm.dynamic_sampling.reward=right", "algorithm.dynamic_sampling.reward = right: there is no dynamic"),
    (
        "algorithm.advantage=remax data.samples_per_prompt=1 rollout.sampling.temperature=0",
        "algorithm.advantage=remax would compare greedy answers with themselves",
    ),
    (
        "algorithm.kl.where=reward algorithm.kl.coefficient=0.1 algorithm.advantage=remax",
        "algorithm.advantage=remax has a baseline without the KL penalty",
    ),
    ("algorithm.overlong.filter_by=tokens", "algorithm.overlong.filter_by = tokens: nothing is filtered"),
    ("algorithm.overlong.buffer=2000", "algorithm.overlong.buffer = 2000: allowed is at most the 1024 tokens"),
    ("rollout.sampling.top_k=0", "rollout.sampling.top_k = 0: allowed is -1 (all) or at least 1"),
    ("rollout.sampling.top_p=0", "rollout.sampling.top_p = 0: allowed is a number above 0"),
    ("rollout.max_response_tokens=100", "rollout.sampling.max_tokens = 1024: allowed is at most rollout.max_response"),
    ("rollout.max_length=100", "rollout.max_length = 100: allowed is more than rollout.max_prompt_tokens = 2048"),
    ("model.build.max_length=256", "model.build.max_length = 256: allowed is at least 3072"),
    (
        "policy.options.tensor_model_parallel_size=2",
        "policy.options.tensor_model_parallel_size: the run decides it; use policy.layout.tensor",
    ),
    (
        "policy.options.calculate_per_token_loss=false",
        "policy.options.calculate_per_token_loss: the run decides it; leave it out",
    ),
    (
        "policy.options.hidden_size=8",
        "policy.options.hidden_size: the run decides it; use another model.path: config.json decides it",
    ),
    (
        "policy.recompute=full policy.options.recompute_granularity=selective",
        "policy.options.recompute_granularity: policy.recompute=full decides it; give policy.recompute=none beside it",
    ),
    ("policy.fusions=[rope,rope] policy.spec=te", "policy.fusions = [rope, rope]: rope is listed twice; give it once"),
    (
        "residency.keep=[kv_cache,kv_cache]",
        "residency.keep = [kv_cache, kv_cache]: kv_cache is listed twice; give it once",
    ),
    ("residency.keep=[critic]", "residency.keep = [critic]: algorithm.advantage=grpo has no critic; leave critic out"),
    (
        "policy.share_prefixes=true policy.layout.context=2",
        "policy.share_prefixes = true: context ranks (2) hold parts of every sequence; give false, or "
        "policy.layout.context=1",
    ),
    (
        "policy.share_prefixes=true policy.moe.aux_loss=0.01",
        "policy.share_prefixes = true: policy.moe.aux_loss=0.01 counts the tokens of every sequence",
    ),
    (
        "policy.share_prefixes=true policy.moe.replay=policy data.mini_batch_prompts=2",
        "policy.share_prefixes = true: policy.moe.replay=policy needs the routes of every sequence's tokens",
    ),
    ("policy.head=fused policy.logit_chunk=512", "policy.logit_chunk = 512: policy.head=fused has no logits in memory"),
    ("policy.optimizer.options.optimizer_cpu_offload=true", "the run decides it; use policy.optimizer.streamed"),
    ("policy.optimizer.options.exp_avg_dtype=bf16", "the run decides it; use policy.optimizer.moments"),
    (
        "policy.options.fine_grained_activation_offloading=true",
        "policy.options.fine_grained_activation_offloading: the run decides it; use policy.offload_layers",
    ),
    ("policy.options.cpu_offloading_num_layers=4", "the run decides it; use policy.offload_layers"),
    (
        "policy.recompute=full policy.offload_layers=4",
        "policy.offload_layers = 4: with policy.recompute=full a layer keeps its input alone; give "
        "policy.recompute=none, selective or moe, or policy.offload_layers=0",
    ),
    ("policy.optimizer.options.main_params_dtype=fp16", "use float32, which master weights and their gradients always"),
    (
        "policy.optimizer.moments=bfloat16",
        "policy.optimizer.moments = bfloat16: it keeps 8 significant bits, and policy.optimizer.beta2 = 0.999 lets",
    ),
    (
        "policy.optimizer.moments=bfloat16 policy.optimizer.beta2=0.95 policy.optimizer.beta1=0.999",
        "policy.optimizer.beta1 = 0.999 lets a moment without a gradient fall by less than half of the last of them",
    ),
    (
        "residency.keep=[optimizer] policy.optimizer.streamed=true",
        "residency.keep = [optimizer]: policy.optimizer.streamed=true keeps the optimizer's state in host memory",
    ),
    ("policy.options.fp8_param=true", "use policy.precision.parameters"),
    *(
        (
            f"policy.options={{{options}}}",
            f"policy.options.{said}",
        )
        for options, said in (
            (
                "recompute_modules:[moe]",
                "recompute_modules = [moe]: megatron-core uses it only with recompute_granularity=sel",
            ),
            ("recompute_modules:[moe],recompute_granularity:full", "recompute_modules = [moe]: megatron-core uses it"),
            (
                "recompute_num_layers:1,recompute_granularity:selective",
                "recompute_num_layers = 1: megatron-core uses it",
            ),
            (
                "recompute_method:block",
                "recompute_method = block: megatron-core uses it only with recompute_granularity=full",
            ),
            (
                "recompute_granularity:full,recompute_method:block",
                "recompute_num_layers: recompute_granularity=full need",
            ),
            (
                "recompute_granularity:full,recompute_num_layers:2",
                "recompute_method: recompute_granularity=full needs it",
            ),
        )
    ),
    (
        "policy.options.recompute_granularity=full",
        "policy.options.recompute_granularity = full: the dry run would plan policy.recompute=none instead",
    ),
    (
        "policy.ddp_options.overlap_grad_reduce=true",
        "policy.ddp_options.overlap_grad_reduce: the run decides it; use policy.overlap",
    ),
    (
        "policy.optimizer.options.adam_beta1=0.5",
        "policy.optimizer.options.adam_beta1: the run decides it; use policy.optimizer.beta1",
    ),
    (
        "rollout.options.tensor_parallel_size=2",
        "rollout.options.tensor_parallel_size: the run decides it; use rollout.te",
    ),
    (
        "rollout.options.enable_sleep_mode=true",
        "rollout.options.enable_sleep_mode: the run decides it; use residency.keep, without the parts that sleep",
    ),
    (
        "residency.keep=[engine_weights] rollout.options.enable_lora=true",
        "rollout.options.enable_lora: no weight sync brings adapters, so an engine with it cannot drop kv_cache; leave",
    ),
    (
        "residency.keep=[parameters] policy.ddp_options.nccl_ub=true",
        "policy.ddp_options.nccl_ub: NCCL keeps the addresses of buffers, so gradients cannot leave the device; leave",
    ),
    ("rollout.options.logprobs_mode=raw", "rollout.options.logprobs_mode: the run decides it; leave it out"),
    (
        "rollout.options.hf_overrides.quantization_config={quant_method:fp8,activation_scheme:dynamic,"
        "weight_block_size:[128,128]}",
        "weights.wire = auto: allowed is fp8, as rollout.options.hf_overrides.quantization_config makes engines",
    ),
    (
        "rollout.options.quantization=fp8_per_tensor",
        "rollout.options.quantization = fp8_per_tensor: a weight sync can update only blocks of FP8 with a scale each",
    ),
    (
        "rollout.options.quantization=online",
        "rollout.options.quantization = online: a weight sync can update only blocks of FP8 with a scale each",
    ),
    (
        "rollout.options.quantization=fp8_per_block rollout.options.quantization_config.moe=int8_per_channel_static",
        "rollout.options.quantization_config: vLLM would quantise layers in another format than a weight sync sends",
    ),
    *(
        (
            f"rollout.options.hf_overrides.quantization_config={{{config}}} weights.wire=fp8",
            f"rollout.options.hf_overrides.quantization_config = {said}: a weight sync sends quantised weights only",
        )
        for config, said in (
            ("quant_method:gptq,bits:4", "{bits: 4, quant_method: gptq}"),
            ("quant_method:fp8", "{quant_method: fp8}"),
            (
                "quant_method:fp8,activation_scheme:dynamic,weight_block_size:[64,64]",
                "{activation_scheme: dynamic, quant_method: fp8, weight_block_size: [64, 64]}",
            ),
        )
    ),
    (
        "rollout.options.quantization=gptq weights.wire=fp8 rollout.options.hf_overrides.quantization_config="
        "{quant_method:fp8,activation_scheme:dynamic,weight_block_size:[128,128]}",
        "rollout.options.quantization = gptq: rollout.options.hf_overrides.quantization_config says fp8, and vLLM "
        "fails",
    ),
    (
        "rollout.options.quantization=int8_per_channel_weight_only weights.wire=fp8",
        "rollout.options.quantization = int8_per_channel_weight_only: a weight sync can update only",
    ),
    (
        "cluster.device=cuda cluster.shared=true algorithm.advantage=gae rollout.engines=8",
        "8 + critic 8 GPUs are more than cluster.nodes · gpus_per_node = 8; allowed is a sum of at most 8: "
        "policy.ranks=4 rollout.engines=4, or more nodes",
    ),
    (
        "cluster.device=cuda cluster.shared=true algorithm.advantage=gae rollout.tensor=8",
        "8 + critic 8 GPUs are more than cluster.nodes · gpus_per_node = 8; allowed is a sum of at most 8: "
        "policy.ranks=4 with smaller engines (rollout.tensor), or more nodes",
    ),
    ("cluster.device=cuda", "policy 8 + engines 1 GPUs are more than cluster.nodes · gpus_per_node = 8"),
    (
        "cluster.device=cuda cluster.nodes=2 rollout.tensor=16",
        "rollout.tensor = 16: allowed is at most cluster.gpus_per_node = 8",
    ),
    (
        "cluster.device=cuda cluster.nodes=4 cluster.gpus_per_node=6 policy.ranks=12 policy.layout.tensor=4",
        "policy.layout.tensor = 4: it does not divide cluster.gpus_per_node = 6, so some tensor parallel group would",
    ),
]


@pytest.mark.parametrize("arguments, line", WRONG, ids=[arguments for arguments, _ in WRONG])
def test_what_is_impossible_is_one_line(base: Path, arguments: str, line: str) -> None:
    with pytest.raises(UserError) as error:
        check(compose(base, arguments.split()))
    assert line in str(error.value)
    assert "\n" not in str(error.value)


def test_a_reward_has_a_number_as_weight(base: Path) -> None:
    config = compose(base, [])
    config.algorithm.reward_weights = {"right": 1, "short": "much"}  # type: ignore[dict-item]
    with pytest.raises(UserError, match=r"algorithm.reward_weights.short = 'much': allowed is a finite number"):
        check(config)
