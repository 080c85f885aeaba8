import verifiers.v1 as vf


class CoatToolset(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = "coat"

    @vf.tool
    def pocket(self, coat: int) -> str:
        """Tells what is in the pocket of a coat."""
        return ["amber", "birch", "cedar"][coat]


if __name__ == "__main__":
    CoatToolset.run()
