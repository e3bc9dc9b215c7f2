// Includes all C++ optimizers, and gives torch's groups and schedulers the names that a program needs after
//
//   namespace optim = fusedstep::optim;
//
// optim::Adam, optim::OptimizerParamGroup and optim::StepLR then work as in torch::optim (docs/cpp.md).
#pragma once
#include <torch/optim.h>

#include "fusedstep/optim/adadelta.h"
#include "fusedstep/optim/adagrad.h"
#include "fusedstep/optim/adam.h"
#include "fusedstep/optim/adamw.h"
#include "fusedstep/optim/adan.h"
#include "fusedstep/optim/asgd.h"
#include "fusedstep/optim/lamb.h"
#include "fusedstep/optim/nadam.h"
#include "fusedstep/optim/plain.h"
#include "fusedstep/optim/rprop.h"
#include "fusedstep/optim/sgd.h"

namespace fusedstep::optim {

using torch::optim::LBFGS;
using torch::optim::LBFGSOptions;
using torch::optim::LBFGSParamState;
using torch::optim::LRScheduler;
using torch::optim::Optimizer;
using torch::optim::OptimizerCloneableOptions;
using torch::optim::OptimizerCloneableParamState;
using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::OptimizerParamState;
using torch::optim::ReduceLROnPlateauScheduler;
using torch::optim::StepLR;

}  // namespace fusedstep::optim
