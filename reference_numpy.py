"""The exact matrices behind BomLA and BomVI, on a tiny tanh network: NumPy alone, float64, slow and obvious on purpose.

Nothing here is shared with boml.py: tests compare the two. A network is a list of matrices W (out, in + 1), the last
column of each being its bias; theta is the concatenation of their vec(W), columns stacked, as in the paper's appendix.
A task is (x_s, y_s, x_q, y_q): support and query inputs (rows) and labels.
"""
import numpy as np

# ----------------------------------------------------------------------------------------------------- Network


def vec(matrices):
    return np.concatenate([W.flatten(order="F") for W in matrices])


def unvec(theta, like):
    ends = np.cumsum([W.size for W in like])
    return [t.reshape(W.shape, order="F") for t, W in zip(np.split(theta, ends[:-1]), like)]


def blocks(net):
    """The slice of theta that each layer's weights occupy."""
    ends = np.cumsum([W.size for W in net])
    return [slice(e - W.size, e) for e, W in zip(ends, net)]


def forward(net, x):
    """Inputs of every layer, with the 1 of the bias, and the class probabilities."""
    inputs = []
    for W in net:
        inputs.append(np.append(x, 1.0))
        h = W @ inputs[-1]
        x = np.tanh(h)
    e = np.exp(h - h.max())
    return inputs, e / e.sum()


def preactivation_gradients(net, inputs, output_gradient):
    """g_l = d loss / d h_l of every layer, given that of the logits."""
    g = [output_gradient]
    for W, a in zip(net[:0:-1], inputs[:0:-1]):
        tanh = a[:-1]
        g.insert(0, (1 - tanh**2) * (W[:, :-1].T @ g[0]))
    return g


def gradient(net, x, y):
    """d/dtheta of -log p(y | x, theta), one example."""
    inputs, p = forward(net, x)
    g = preactivation_gradients(net, inputs, p - np.eye(len(p))[y])
    return vec([np.outer(gl, a) for gl, a in zip(g, inputs)])


def loss(net, xs, ys):
    return np.mean([-np.log(forward(net, x)[1][y]) for x, y in zip(xs, ys)])


def mean_gradient(net, xs, ys):
    return np.mean([gradient(net, x, y) for x, y in zip(xs, ys)], axis=0)


def hessian_times(net, direction, x, y):
    """The exact Hessian of -log p(y | x) times a direction: the derivative of every line of `gradient` along it."""
    inputs, p = forward(net, x)
    V = unvec(direction, net)
    d_inputs = [np.zeros(len(inputs[0]))]  # derivative of every layer's input
    for l, W in enumerate(net):
        dh = V[l] @ inputs[l] + W @ d_inputs[l]
        if l + 1 < len(net):
            d_inputs.append(np.append((1 - inputs[l + 1][:-1] ** 2) * dh, 0.0))
    dg = (np.diag(p) - np.outer(p, p)) @ dh  # derivative of the logits' gradient p - onehot(y)
    g = preactivation_gradients(net, inputs, p - np.eye(len(p))[y])
    out = [np.outer(dg, inputs[-1]) + np.outer(g[-1], d_inputs[-1])]
    for l in range(len(net) - 1, 0, -1):
        tanh, dtanh = inputs[l][:-1], d_inputs[l][:-1]
        back, dback = net[l][:, :-1].T @ g[l], V[l][:, :-1].T @ g[l] + net[l][:, :-1].T @ dg
        dg = (1 - tanh**2) * dback - 2 * tanh * dtanh * back
        out.insert(0, np.outer(dg, inputs[l - 1]) + np.outer(g[l - 1], d_inputs[l - 1]))
    return vec(out)


def hessian(net, xs, ys):
    """The exact Hessian of the mean loss, all layers, column by column."""
    D = sum(W.size for W in net)
    columns = [np.mean([hessian_times(net, e, x, y) for x, y in zip(xs, ys)], axis=0) for e in np.eye(D)]
    return np.stack(columns, axis=1)


def fisher(net, xs):
    """The exact Fisher (Eq. 10): mean over x, expectation over y ~ p(y | x, theta), all layers."""
    F = 0.0
    for x in xs:
        p = forward(net, x)[1]
        for y in range(len(p)):
            g = gradient(net, x, y)
            F = F + p[y] * np.outer(g, g) / len(xs)
    return F


# -------------------------------------------------------------------------------------------------- Adaptation


def adapt(net, xs, ys, rate, steps):
    """Eq. 1: `steps` steps of SGD; returns the networks at which the gradients were taken, and the adapted one."""
    path = []
    for _ in range(steps):
        path.append(net)
        net = unvec(vec(net) - rate * mean_gradient(net, xs, ys), net)
    return path, net


def jacobian(net, xs, ys, rate, steps):
    """d adapted / d theta = (I - rate H_k) ... (I - rate H_1), each H exact at its own step."""
    J = np.eye(len(vec(net)))
    for at in adapt(net, xs, ys, rate, steps)[0]:
        J = (np.eye(len(J)) - rate * hessian(at, xs, ys)) @ J
    return J


def meta_gradient(net, tasks, rate, steps, support_weight=0.0):
    """d/dtheta of the mean over tasks of loss(adapted, query) + support_weight loss(theta, support)."""
    total = 0.0
    for x_s, y_s, x_q, y_q in tasks:
        _, adapted = adapt(net, x_s, y_s, rate, steps)
        total = total + jacobian(net, x_s, y_s, rate, steps).T @ mean_gradient(adapted, x_q, y_q)
        total = total + support_weight * mean_gradient(net, x_s, y_s)
    return total / len(tasks)


# ----------------------------------------------------------------------------------------------------- Laplace


def adapted_fisher(net, tasks, rate, steps):
    """Eq. 11 exactly: the mean over tasks of J' F(adapted, query) J."""
    total = 0.0
    for x_s, y_s, x_q, _ in tasks:
        J = jacobian(net, x_s, y_s, rate, steps)
        total = total + J.T @ fisher(adapt(net, x_s, y_s, rate, steps)[1], x_q) @ J
    return total / len(tasks)


def kfac_factors(net, xs):
    """Of every layer: A = mean of a a', G = mean over x and expectation over y of g g'."""
    A = [np.zeros((W.shape[1],) * 2) for W in net]
    G = [np.zeros((W.shape[0],) * 2) for W in net]
    for x in xs:
        inputs, p = forward(net, x)
        for l, a in enumerate(inputs):
            A[l] += np.outer(a, a) / len(xs)
        for y in range(len(p)):
            for l, g in enumerate(preactivation_gradients(net, inputs, p - np.eye(len(p))[y])):
                G[l] += p[y] * np.outer(g, g) / len(xs)
    return A, G


def sandwich(A, G, At, Gt, rate):
    """(I - rate A (x) G) (At (x) Gt) (I - rate A (x) G)', dense."""
    J = np.eye(len(A) * len(G)) - rate * np.kron(A, G)
    return J @ np.kron(At, Gt) @ J.T


def four_terms(A, G, At, Gt, rate, averaging):
    """The paper's expansion from lists over tasks. `products`: each product of factors averaged over tasks;
    `averages`: each factor averaged over tasks, then multiplied."""
    if averaging == "averages":
        A, G, At, Gt = ([np.mean(X, axis=0)] for X in (A, G, At, Gt))
    mean = lambda products: np.mean(list(products), axis=0)
    return (
        np.kron(mean(At), mean(Gt))
        - rate * np.kron(mean(a @ b for a, b in zip(A, At)), mean(g @ h for g, h in zip(G, Gt)))
        - rate * np.kron(mean(b @ a.T for a, b in zip(A, At)), mean(h @ g.T for g, h in zip(G, Gt)))
        + rate**2 * np.kron(mean(a @ b @ a.T for a, b in zip(A, At)), mean(g @ h @ g.T for g, h in zip(G, Gt)))
    )


def penalty(theta, mean, precision):
    """1/2 (theta - mean)' precision (theta - mean)."""
    return 0.5 * (theta - mean) @ precision @ (theta - mean)


# ------------------------------------------------------------------------------------------------- Variational


def gaussian_kl(mean, covariance, prior_mean, prior_covariance):
    """KL(N(mean, covariance) || N(prior_mean, prior_covariance)) with full matrices."""
    inverse, d = np.linalg.inv(prior_covariance), prior_mean - mean
    log_ratio = np.linalg.slogdet(prior_covariance)[1] - np.linalg.slogdet(covariance)[1]
    return 0.5 * (np.trace(inverse @ covariance) + d @ inverse @ d - len(mean) + log_ratio)
