"""laplace-torch on the last layer of a network, from its features; called by experiments/laplace.py.

Runs in an environment of its own, without ibnn: PYTHON -P laplace_library.py FOLDER, with FOLDER/given.pt.
"""

import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

operators = torch.library.Library("torchvision", "DEF")  # torchvision asks for them when it is imported; none is called
for name in ("nms", "qnms"):
    operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from laplace import Laplace  # noqa: E402

folder = Path(sys.argv[1])
given = torch.load(folder / "given.pt", weights_only=True)
features, labels = given["features"], given["labels"]
last = nn.Linear(*reversed(given["weight"].shape))
last.load_state_dict({"weight": given["weight"], "bias": given["bias"]})
train, valid = (DataLoader(TensorDataset(features[key], labels[key]), batch_size=250) for key in ("train", "valid"))
net = nn.Sequential(nn.Identity(), last)
began = time.process_time()
found = Laplace(net, "classification", subset_of_weights="last_layer", hessian_structure="kron", last_layer_name="1")
found.fit(train)
found.optimize_prior_precision(method="gridsearch", pred_type="glm", link_approx="probit", val_loader=valid)
fitted = time.process_time() - began
began = time.process_time()
logs = {key: found(x, pred_type="glm", link_approx="probit").log() for key, x in features.items()}
facts = {"fit seconds": fitted, "answer seconds": time.process_time() - began}
facts["prior precision"] = float(found.prior_precision)
torch.save({"logs": {key: value.detach() for key, value in logs.items()}, "facts": facts}, folder / "found.pt")
