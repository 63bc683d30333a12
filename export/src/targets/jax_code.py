

def meshes(devices):
    """The mesh of each stage, from all devices in the order of ranks."""
    made = []
    for first, axes in STAGES:
        names, sizes = zip(*axes) if axes else ((), ())
        n = int(np.prod(sizes, dtype=int))
        own = np.asarray(devices[first : first + n]).reshape(sizes)
        made.append(Mesh(own, names))
    return made


def parameters():
    """Stage, shape, spec in use and spec at rest of every parameter, by its path."""
    made = {}
    for stage, layers, relative in RUNS:
        for layer in layers:
            for path, leaf in relative.items():
                made[path.replace("{}", layer, 1)] = (stage, *leaf)
    return made


def shardings(devices, at_rest=True):
    """The sharding of every parameter, at rest or in use."""
    own = meshes(devices)
    return {
        path: NamedSharding(own[stage], rest if at_rest else use)
        for path, (stage, _, use, rest) in parameters().items()
    }


def batch_shardings(devices):
    """The shardings of a microbatch's tokens and labels."""
    own = meshes(devices)
    return {what: NamedSharding(own[stage], spec) for what, (stage, spec) in BATCH.items()}


def constrain(path, x, mesh):
    """`x`, the result of the forward op at `path`, laid out as in the plan."""
    for layers, relative in ACTIVATIONS:
        for layer in layers:
            for op, spec in relative.items():
                if op.replace("{}", layer, 1) == path:
                    return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
    raise KeyError(path)
