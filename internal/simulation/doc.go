// Package simulation contains no code for users. Its tests run a fleet of Loaders under random faults, in simulated
// time.
//
// A schedule is drawn from one seed. The seed decides the settings of three nodes, their faults, and the calls of their
// clients. A schedule runs in one testing/synctest bubble. The nodes share one memory.Store, and each node reaches this
// store through a nodeStore of its own, which delays, loses and repeats calls. After the schedule, a checker judges
// each answer, each load and each change of the store by the guarantees G1 to G8 (docs/guarantees.md).
//
// go test -run TestSchedules -seed=N repeats one schedule. Two runs of a schedule are mostly, but not always, the same.
// Goroutines that are ready at the same simulated moment run in an order that Go chooses. Each node and each client has
// a random source of its own, so another order changes only the events that depend on this order. The seeds of the hash
// functions of L1 and the choices of ristretto also differ from run to run.
package simulation
