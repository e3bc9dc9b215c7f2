"""The interface of torch.optim: the base class, state_dict, torch.compile."""
