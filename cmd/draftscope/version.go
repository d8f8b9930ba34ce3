package main

import (
	"context"
	"fmt"
	"runtime"
	"runtime/debug"
)

const versionHelp = `usage: draftscope version

Prints the version of the program and of the Go that built it.
`

func cmdVersion(_ context.Context, args []string, out streams) error {
	fs := newFlags("version", versionHelp, out)
	if err := parseNone(fs, args); err != nil {
		return err
	}
	fmt.Fprintf(out.stdout, "draftscope %s (%s, %s/%s)\n", version(), runtime.Version(), runtime.GOOS, runtime.GOARCH)
	return nil
}

// version is the module's version, or the commit that it was built from.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	if v := info.Main.Version; v != "" && v != "(devel)" {
		return v
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" {
			return s.Value[:min(12, len(s.Value))]
		}
	}
	return "devel"
}
