package main

import (
	"context"
	"os"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

// asProgram in the environment makes the test binary the program itself.
const asProgram = "DRAFTSCOPE_TEST_AS_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		os.Exit(run(context.Background(), os.Args[1:], os.Stdout, os.Stderr))
	}
	testscript.Main(m, map[string]func(){
		"draftscope": func() { os.Exit(run(context.Background(), os.Args[1:], os.Stdout, os.Stderr)) },
	})
}

// TestScripts runs what testdata/script says a user types and sees.
func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir: "testdata/script",
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"copydir":     copyDir,
			"demo":        unpackDemo,
			"exits":       exits,
			"flipbody":    flipBody,
			"flipfooter":  flipFooter,
			"removefirst": removeFirst,
			"replace":     replace,
			"split":       split,
			"truncate":    truncate,
		},
	})
}
