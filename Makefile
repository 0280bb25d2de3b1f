# Targets: test, lint, bench, fuzz, model, torture, services. `make` without a target explains them.
# The Makefile needs only Go, make and sh. go.work lists the modules.

MODULE   = github.com/refill-go/refill
REALTEST = $(MODULE)/internal/realtest

# `make lint` builds golangci-lint once, outside of the tree. v2.12 is the newest version that builds with Go 1.25.
LINT_VERSION = v2.12.2
CACHE        = $${REFILL_CACHE:-$${XDG_CACHE_HOME:-$${HOME:-/tmp}/.cache}/refill}

SUITE     = l1,heap,l2,again,wait
FUZZTIME  = 10s

.PHONY: help test servers lint bench fuzz services model torture

help:
	@echo 'make test      run the tests of all modules, with the race detector and real servers'
	@echo 'make lint      run golangci-lint $(LINT_VERSION) in all modules'
	@echo 'make bench     compare refill with its peers; the machine should be idle  (SUITE=$(SUITE))'
	@echo 'make fuzz      run each fuzz test for a short time  (FUZZTIME=$(FUZZTIME))'
	@echo 'make model     check the model of the protocol with spin'
	@echo 'make torture   test each promise at length, then break it  (20 minutes; REFILL_TORTURE_FOR=5m)'
	@echo 'make services  start a Redis on a free port, and print how to stop it'
	@echo 'As root, these install missing programs with apt-get. Otherwise they print the command.'

# The pattern matches the packages of all modules of go.work, because their paths have the same prefix. The tests with
# real servers run last and alone: beside other tests, a server would be late. The race detector needs gcc. Without gcc
# the tests run without the race detector; with REFILL_NO_SKIP=1 they fail.
test: servers
	@race=-race; command -v gcc >/dev/null || [ "$$REFILL_NO_SKIP" = 1 ] || race=; \
	packages=$$(go list $(MODULE)/... | grep -v '^$(REALTEST)$$') || exit 1; \
	set -x; go test $$race -shuffle=on -count=1 $$packages && go test $$race -shuffle=on -count=1 $(REALTEST)

# Installs, or asks for, the programs that the tests need. A test whose program is missing is skipped. With
# REFILL_NO_SKIP=1 such a test fails.
servers:
	@$(call need,redis-server,redis-server,the tests with a real Redis)
	@$(call need,pg_createcluster,postgresql,the tests with a real PostgreSQL)
	@$(call need,mariadb-install-db,mariadb-server,the tests with a real MariaDB)
	@$(call need,gcc,gcc libc6-dev,the race detector and the tests that set the clock of a Redis)

# need PROGRAM,PACKAGES,WHAT IS SKIPPED WITHOUT THE PROGRAM. If the program is missing, need installs the packages as
# root (containers, CI). As another user, need prints the command that installs them, and never calls sudo.
need = if command -v $(1) >/dev/null; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo '$(1) is not installed. Installing as root: apt-get install $(2)'; \
		apt='env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=120'; \
		{ $$apt update && $$apt install -y --no-install-recommends $(2); } </dev/null >&2 || true; \
		if command -v $(1) >/dev/null; then exit 0; fi; \
		echo 'apt-get could not install it.'; \
	fi; \
	echo '$(1) is not installed. Skipped without it: $(3).'; \
	echo 'To install it on Debian or Ubuntu:'; \
	echo '    sudo apt-get update && sudo apt-get install -y --no-install-recommends $(2)'

model:
	@$(call need,gcc,gcc libc6-dev,the check of the model)
	@$(call need,spin,spin,the check of the model)
	docs/model/check.sh

# Runs the tests of every promise at length. Then breaks the code for each test, and checks that the test fails. Writes
# the tables of docs/guarantees.md. REFILL_TORTURE_FOR is how long the history test runs.
torture: servers
	go run ./internal/realtest/torture -breaks -write

lint:
	@bin="$(CACHE)/golangci-lint-$(LINT_VERSION)-$$(go env GOVERSION)"; \
	if [ ! -x "$$bin/golangci-lint" ]; then \
		echo 'building golangci-lint $(LINT_VERSION), once (a minute or two)'; \
		GOBIN="$$bin" GOFLAGS= go install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(LINT_VERSION) || exit 1; \
	fi; \
	go list -m -f '{{.Dir}}' | { status=0; while IFS= read -r dir; do \
		echo "golangci-lint run  $$dir"; \
		(cd "$$dir" && "$$bin/golangci-lint" run ./... </dev/null) || status=1; \
	done; exit $$status; }

bench: servers
	go run ./bench -suite '$(SUITE)'

# A loop, because go test -fuzz runs only one fuzz test of one package.
fuzz:
	@go list -f '{{.Dir}}' $(MODULE)/... | while IFS= read -r dir; do \
		cat "$$dir"/*_test.go 2>/dev/null | sed -n 's/^func \(Fuzz[A-Za-z0-9_]*\)(.*/\1/p' | while read -r name; do \
			echo "$$name in $$dir"; \
			(cd "$$dir" && go test -run '^$$' -fuzz "^$$name\$$" -fuzztime '$(FUZZTIME)' . </dev/null) || exit 1; \
		done || exit 1; \
	done

# Redis runs in the foreground until Ctrl-C. `make services &` runs it in the background.
services: servers
	@command -v redis-server >/dev/null || exit 1; \
	dir=$$(mktemp -d); pid=; trap 'kill $$pid 2>/dev/null; wait; rm -rf "$$dir"' EXIT; trap 'exit 0' INT TERM; \
	for port in 6390 6391 6392 6393 6394 6395 6396 6397 6398 6399; do \
		redis-server --port $$port --bind 127.0.0.1 --dir "$$dir" --save '' --appendonly no >"$$dir/log" 2>&1 & pid=$$!; \
		while kill -0 $$pid 2>/dev/null; do \
			if redis-cli -p $$port info server 2>/dev/null | grep -q "^process_id:$$pid[^0-9]"; then \
				echo "Redis listens on 127.0.0.1:$$port. Stop it with Ctrl-C, or with: kill $$pid"; \
				wait $$pid; exit 0; \
			fi; \
			sleep 0.05; \
		done; \
	done; \
	echo 'Redis does not start:'; tail -n 5 "$$dir/log"; exit 1
