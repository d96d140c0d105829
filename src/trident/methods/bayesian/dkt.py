"""Deep Kernel Transfer (Patacchiola et al. 2020): Gaussian-process regression of the classes' labels."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import MultivariateNormal

from trident.methods.base import About, Losses, Parameters, setting, tunable
from trident.methods.bayesian.kernel_head import KernelHead, solve
from trident.nn.classes import members_of
from trident.tasks.task import Labels, Task, all_labels


@dataclass(frozen=True)
class DeepKernelTransfer(KernelHead):
    """A Gaussian process on deep features regresses, for each class, +1 for its images and -1 for all others.

    Learned: the backbone and the kernel's scale v (`kernel_head.py`), without an inner loop, by maximising the exact
    marginal likelihood of all labels of a task, those of the queries too, with K the kernel of all its images:

        sum over classes of  log N(t_c; 0, K + noise I),     t_ic = +1 if image i is of class c, otherwise -1

    (divided by the number of images and classes). At test the processes are conditioned on the support set:

        m_c(x) = k(x, S) (K_SS + noise I)^-1 t_c,     p(y = c | x)  ~  sigmoid(scale * m_c(x))

    The published method takes the class of the largest sigmoid(m_c) and gives no probabilities; they are made of these
    sigmoids here. Its default kernel has a batch norm before the cosine; here that is `normalisation` = CL2N.
    """

    about = About(
        "Deep Kernel Transfer",
        "Patacchiola et al. 2020",
        "Bayesian Meta-Learning for the Few-Shot Setting via Deep Kernels",
    )
    noise: float = setting(0.1, "variance of the labels around the process; fixed, as published", above=0)
    scale: float = tunable(1.0, "scale of posterior means in the logits: how confident the probabilities are", above=0)

    def head(self, parameters: Parameters, features: Tensor, task: Task) -> Tensor:
        kernel = self.kernel(parameters, features)
        factor = self.factor(kernel[:, task.support, task.support])
        targets = 2 * members_of(task.support_labels, task.n_way, kernel).mT - 1  # (task, n_support, n_way)
        means = kernel[:, task.queries, task.support] @ solve(factor, targets)
        return F.logsigmoid(self.scale * means)

    def factor(self, kernel: Tensor) -> Tensor:
        """Cholesky factor of the labels' covariance. `cholesky` would wait for the GPU to check for errors."""
        noise = self.noise * torch.eye(kernel.shape[1], dtype=kernel.dtype, device=kernel.device)
        factor: Tensor = torch.linalg.cholesky_ex(kernel + noise).L
        return factor

    def training(self, parameters: Parameters, features: Tensor, task: Task, labels: Labels) -> tuple[Tensor, Losses]:
        factor = self.factor(self.kernel(parameters, features))[:, None]  # (task, 1, image, image)
        targets = 2 * members_of(all_labels(task, labels), task.n_way, features) - 1  # (task, n_way, image)
        likelihood = MultivariateNormal(torch.zeros_like(targets), scale_tril=factor, validate_args=False)
        with torch.no_grad():  # only to count how many are right
            logits = self.head(parameters, features, task)
        log_likelihood: Tensor = likelihood.log_prob(targets)  # type: ignore[no-untyped-call]  # (task, n_way)
        return logits, {"total": -log_likelihood.mean(1) / targets.shape[2]}
