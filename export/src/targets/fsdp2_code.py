

def device_mesh():
    """The mesh of all ranks, one dim for each entry of MESH."""
    names, sizes = zip(*MESH)
    return init_device_mesh(DEVICE, sizes, mesh_dim_names=names)


def context_mesh():
    """The ranks that share a sequence, for context_parallel: neighbours, but for tensor ranks."""
    sizes = dict(MESH)
    inside = CONTEXT * sizes["tensor"]
    outside = sizes["pipeline"] * sizes["replicate"] * sizes["shard"] * sizes["tensor"] // inside
    names = ("outside", "context", "tensor")
    mesh = init_device_mesh(DEVICE, (outside, CONTEXT, sizes["tensor"]), mesh_dim_names=names)
    return mesh["context"]


def placements():
    """Tensor placement and dim at rest of every parameter, by its name in the model."""
    made = {}
    for layers, relative in PARAMETERS:
        for layer in layers:
            block = f"{BLOCKS}.{layer.rsplit('.', 1)[-1]}"
            for name, how in relative.items():
                made[name.replace("{}", block, 1)] = how
    return made


def parallelize(model, mesh):
    """Lays out the parameters of `model`, in place: tensor placements, then ZeRO.

    A parameter that the model has twice (a tied table) is laid out once.
    """
    own = placements()
    sizes = dict(MESH)
    if sizes["tensor"] > 1:
        for module_name, module in model.named_modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                placement, _ = how(own, f"{module_name}.{name}" if module_name else name)
                laid_out = distribute_tensor(parameter.data, mesh["tensor"], [placement])
                setattr(module, name, nn.Parameter(laid_out, parameter.requires_grad))
    blocks = model.get_submodule(BLOCKS)
    for i, block in enumerate(blocks):
        if i in FULL or i in SELECTIVE:
            checkpoint(block, i in SELECTIVE)
    if sizes["shard"] * sizes["replicate"] == 1:
        return model
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def dim_at_rest(parameter):
        name = names.get(id(parameter))
        return None if name is None else Shard(how(own, name)[1])

    # Copies alone are a mesh with one rank to split over.
    over = mesh["replicate", "shard"] if sizes["replicate"] > 1 else mesh["shard"]
    options = {
        "mesh": over,
        "reshard_after_forward": ZERO == 3,
        "shard_placement_fn": dim_at_rest,
        "mp_policy": MixedPrecisionPolicy(COMPUTE_DTYPE, torch.float32),
    }
    if OFFLOAD:
        options["offload_policy"] = CPUOffloadPolicy()
    for block in blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def how(own, name):
    """The placements of a parameter; of an expert's by the pattern of all."""
    if name in own:
        return own[name]
    parts = ["*" if part.isdigit() else part for part in name.split(".")]
    prefix = len(BLOCKS.split(".")) + 1
    pattern = ".".join(name.split(".")[:prefix] + parts[prefix:])
    return own.get(pattern, (Replicate(), 0))


def checkpoint(block, selective):
    """Has the block's forward pass run again in its backward pass."""
    kept = {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    }

    def policy(context, op, *args, **kwargs):
        keep = CheckpointPolicy.MUST_SAVE
        return keep if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts():
        return create_selective_checkpoint_contexts(policy)

    forward = block.forward
    options = {"context_fn": contexts} if selective else {}

    def again(*args, **kwargs):
        return torch.utils.checkpoint.checkpoint(
            forward, *args, use_reentrant=False, **options, **kwargs
        )

    block.forward = again


def begin(model, i):
    """Prepares the i-th microbatch of a step: what is gathered or reduced once a step waits."""
    if not hasattr(model, "set_requires_gradient_sync"):
        return
    last = i + 1 == ACCUMULATION
    model.set_is_last_backward(last)
    if ZERO < 3:
        model.set_reshard_after_backward(last)
    if ZERO < 2:
        model.set_requires_gradient_sync(last)
    model.set_requires_all_reduce(last)


def optimizer(model, lr):
    """The plan's optimizer: only parameters with two or more dims decay."""
    make, options = OPTIMIZER
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": decay, "weight_decay": WEIGHT_DECAY},
        {"params": rest, "weight_decay": 0.0},
    ]
    return make(groups, lr=lr, **options)
