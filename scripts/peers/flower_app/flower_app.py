"""Flower: FedAvg, the mean of parameters at a server, a new inner optimizer a round."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from scripts.peers import task as task_lib
from scripts.peers import torch_model

client = ClientApp()
server = ServerApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    """Takes the inner steps of a round."""
    torch.set_num_threads(1)
    task = task_lib.of_folder(
        str(context.run_config["folder"]), int(context.node_config["worker"])
    )
    log, model = task_lib.Log(task), torch_model.Model(task)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    inner = torch_model.optimizer(task, model)
    at = int(message.content["config"]["server-round"])
    for number in range(task.inner_steps):
        step = (at - 1) * task.inner_steps + number + 1
        torch_model.step(task, log, step, model, inner)
        inner.step()
    log.round(at)  # the server's say when it is averaged
    arrays = ArrayRecord(model.state_dict())
    weight = MetricRecord({"num-examples": task.batch})
    content = RecordDict({"arrays": arrays, "metrics": weight})
    return Message(content=content, reply_to=message)


@server.main()
def serve(grid: Grid, context: Context) -> None:
    """Averages, and measures the held-out loss at the end."""
    task = task_lib.of_folder(str(context.run_config["folder"]), 2)
    log, model = task_lib.Log(task), torch_model.Model(task)

    def after(number: int, arrays: ArrayRecord) -> MetricRecord:
        if number:
            log.round(number)
        if number == task.rounds:
            model.load_state_dict(arrays.to_torch_state_dict())
            log.end(torch_model.held_out_loss(task, model))
        return MetricRecord({"round": number})

    mean = FedAvg(
        fraction_evaluate=0.0,
        min_train_nodes=2,
        min_evaluate_nodes=0,
        min_available_nodes=2,
    )
    begin = ArrayRecord(model.state_dict())
    rounds, timeout = task.rounds, 600.0
    mean.start(grid, begin, num_rounds=rounds, timeout=timeout, evaluate_fn=after)
