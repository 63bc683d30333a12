// The end of a step: norm, clipping, loss scale and updates.

// Adds up to eight operands to the scratch sum y[0]: n = operands, elements of each, whether the
// sum begins; the last call writes its root to y[1]: n[3].
KERNEL(global_norm) {
    Out<double> sum(a.y[0]);
    if (threadIdx.x != 0) return;
    double total = a.n[2] ? 0.0 : sum.at(0);
    for (int k = 0; k < (int)a.n[0]; k++) {
        In<f32> x(a.x[k]);
        for (i64 i = 0; i < a.n[4 + k]; i++) total += (double)x[i];
    }
    sum.raw(0, total);
    if (a.n[3]) {
        Out<f32> norm(a.y[1]);
        norm.set(0, (float)sqrt(total));
    }
}

// norm, loss scale to the gradients' coefficient: n = whether there is a largest norm; f = it.
KERNEL(clip_coefficient) {
    In<T0> x(a.x[0]);
    In<T1> s(a.x[1]);
    Out<O0> y(a.y[0]);
    if (threadIdx.x != 0) return;
    double norm = x[0], scale = s[0], clipped = 1.0;
    if (a.n[0]) {
        double most = a.f[0] / (norm / scale + 1e-6);
        clipped = most < 1.0 ? most : 1.0;
    }
    y.set(0, norm - norm == 0.0 ? (float)(clipped / scale) : NOT_A_NUMBER);
}

// scale, good steps, updates, norm to the next of the first three: f = interval, lowest scale.
KERNEL(update_loss_scale) {
    In<T0> scale(a.x[0]);
    In<T1> good(a.x[1]);
    In<T2> updates(a.x[2]);
    In<T3> norm(a.x[3]);
    Out<O0> next_scale(a.y[0]);
    Out<O1> next_good(a.y[1]);
    Out<O2> next_updates(a.y[2]);
    if (threadIdx.x != 0) return;
    float old = scale[0], steps = good[0], lowest = (float)a.f[1], count = updates[0];
    bool is_good = norm[0] - norm[0] == 0.0f;
    if (!is_good) {
        next_scale.set(0, old * 0.5f > lowest ? old * 0.5f : lowest);
        next_good.set(0, 0.0f);
    } else if ((double)steps + 1.0 >= a.f[0]) {
        next_scale.set(0, old * 2.0f);
        next_good.set(0, 0.0f);
    } else {
        next_scale.set(0, old);
        next_good.set(0, steps + 1.0f);
    }
    next_updates.set(0, count + (is_good ? 1.0f : 0.0f));
}

// p, m and v in place from g and the coefficient, as torch.optim.AdamW. A coefficient that is no
// number changes nothing. n = elements, whether operand 5 has the number of updates done; f = beta1,
// beta2, eps, weight decay.
JOINED_KERNEL(adam_w) {
    In<T1> g(a.x[1]);
    In<f32> coefficient(a.x[4]);
    Out<O0> p(a.y[0]);
    Out<O1> m(a.y[1]);
    Out<O2> v(a.y[2]);
    const float c = coefficient[0];
    if (!(c - c == 0.0f)) return;
    double done = (double)now.updates;
    if (a.n[1]) {
        In<f32> updates(a.x[5]);
        done = (double)(i64)updates[0];
    }
    const i64 n = a.n[0];
    const double step = done + 1.0, lr = now.lr;
    const float decay = (float)(1.0 - lr * a.f[3]), eps = (float)a.f[2];
    const float beta1 = (float)a.f[0], weight1 = (float)(1.0 - a.f[0]);
    const float beta2 = (float)a.f[1], weight2 = (float)(1.0 - a.f[1]);
    const float root = (float)sqrt(1.0 - pow(a.f[1], step));
    const float size = (float)(lr / (1.0 - pow(a.f[0], step)));
    if (WIDE) {
        In<O0> old_p(a.y[0]);
        In<O1> old_m(a.y[1]);
        In<O2> old_v(a.y[2]);
        FOR_MINE(j, n / 8) {
            float gs[8], ps[8], ms[8], vs[8];
            load8(g, 8 * j, gs);
            load8(old_p, 8 * j, ps);
            load8(old_m, 8 * j, ms);
            load8(old_v, 8 * j, vs);
            for (int k = 0; k < 8; k++) {
                const float gi = c * gs[k];
                ms[k] = weight1 < 0.5f ? ms[k] + weight1 * (gi - ms[k]) : gi - (gi - ms[k]) * beta1;
                vs[k] = vs[k] * beta2 + weight2 * gi * gi;
                ps[k] = ps[k] * decay - size * ms[k] / (sqrtf(vs[k]) / root + eps);
            }
            store8(m, 8 * j, ms);
            store8(v, 8 * j, vs);
            store8(p, 8 * j, ps);
        }
        return;
    }
    FOR_MINE(i, n) {
        float gi = c * g[i], mi = m[i], vi = v[i];
        // torch.lerp starts from the nearer end.
        mi = weight1 < 0.5f ? mi + weight1 * (gi - mi) : gi - (gi - mi) * beta1;
        vi = vi * beta2 + weight2 * gi * gi;
        m.set(i, mi);
        v.set(i, vi);
        p.set(i, p[i] * decay - size * mi / (sqrtf(vi) / root + eps));
    }
}

// p and its buffer in place from g and the coefficient, as torch.optim.SGD: n = elements; f =
// momentum, weight decay.
JOINED_KERNEL(sgd) {
    In<T1> g(a.x[1]);
    In<f32> coefficient(a.x[3]);
    Out<O0> p(a.y[0]);
    Out<O1> buffer(a.y[1]);
    const float c = coefficient[0];
    if (!(c - c == 0.0f)) return;
    const i64 n = a.n[0];
    const float lr = (float)now.lr, momentum = (float)a.f[0], decay = (float)a.f[1];
    FOR_MINE(i, n) {
        float old = p[i], b = momentum * buffer[i] + (c * g[i] + decay * old);
        buffer.set(i, b);
        p.set(i, old - lr * b);
    }
}
