"""Flower: FedAvg, the mean of parameters at a server, a new inner optimizer a round."""

import pathlib

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from scripts.peers import task as task_lib
from scripts.peers import torch_model

client = ClientApp()
server = ServerApp()


def worker_of(context: Context, number: int) -> torch_model.Worker:
    """Returns the worker of this number, at step 0."""
    path = pathlib.Path(str(context.run_config["folder"]), f"task{number}.json")
    return torch_model.Worker(task_lib.read(path))


@client.train()
def train(message: Message, context: Context) -> Message:
    """Takes the inner steps of a round."""
    worker = worker_of(context, int(context.node_config["worker"]))
    worker.model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    at = int(message.content["config"]["server-round"])
    for number in range(
        (at - 1) * worker.task.inner_steps, at * worker.task.inner_steps
    ):
        worker.step(number + 1)
    worker.log.round(at)  # the server's say when it is averaged
    arrays = ArrayRecord(worker.model.state_dict())
    weight = MetricRecord({"num-examples": worker.task.batch})
    content = RecordDict({"arrays": arrays, "metrics": weight})
    return Message(content=content, reply_to=message)


@server.main()
def serve(grid: Grid, context: Context) -> None:
    """Averages, and measures the held-out loss at the end."""
    worker = worker_of(context, task_lib.SERVER)
    rounds = worker.task.rounds

    def after(number: int, arrays: ArrayRecord) -> MetricRecord:
        if number:
            worker.log.round(number)
        if number == rounds:
            worker.model.load_state_dict(arrays.to_torch_state_dict())
            worker.log.end(worker.loss())
        return MetricRecord({"round": number})

    mean = FedAvg(
        fraction_evaluate=0.0,
        min_train_nodes=2,
        min_evaluate_nodes=0,
        min_available_nodes=2,
    )
    begin = ArrayRecord(worker.model.state_dict())
    mean.start(grid, begin, num_rounds=rounds, timeout=600.0, evaluate_fn=after)
