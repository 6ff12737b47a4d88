"""Tables of the machine: which pipe each opcode uses, how long it holds it, and the constants of the memory path.

Marks of a source: [P] what ptxas 13 encodes in stall counts (compile independent copies, read the stalls), [L] Huerta
et al., "Dissecting and Modeling the Architecture of Modern GPU Cores", MICRO 2025, arXiv 2503.20481, [T] measured on a
Quadro RTX 6000 of sm_75 by github.com/connollydavid/tu102, [D] data sheet or CUDA guide, `fitted` to 26 published
figures of FlashAttention-2 on seven GPUs, [?] a guess that hardly matters. Fixed latencies need no table: ptxas has put
them into the stall counts.
"""

from dataclasses import dataclass, replace

from .errors import UnknownArchitecture, UnknownOpcode

# Pipes of a sub-partition. Order matters: the first four have one busy time each in the simulation.
FMA, ALU, SPECIAL, TENSOR_CORE, MEMORY, CONTROL = range(6)


@dataclass(frozen=True, slots=True)
class PipeRates:
    """Cycles for which one warp instruction holds a pipe of its sub-partition (32 lanes / lanes of the pipe)."""

    fma: float  # FFMA, FMUL, FADD
    packed_fma: float  # FFMA2 and the like: two FP32 results a lane
    half: float  # HFMA2 and the like
    integer_multiply: float  # IMAD, on the FMA pipe
    alu: float  # compares, selects, adds, logic, moves
    convert: float  # F2FP: two FP32 to a packed pair, on the ALU pipe
    special: float  # MUFU


# fma, alu and convert [P]; special 16 lanes an SM [D]; integer_multiply 64 lanes an SM [D]; half [D].
RATES = {
    75: PipeRates(fma=2, packed_fma=4, half=2, integer_multiply=2, alu=2, convert=2, special=8),  # [D] [T]
    80: PipeRates(fma=2, packed_fma=4, half=1, integer_multiply=2, alu=2, convert=2, special=8),
    86: PipeRates(fma=1, packed_fma=2, half=1, integer_multiply=2, alu=2, convert=2, special=8),
    87: PipeRates(fma=1, packed_fma=2, half=1, integer_multiply=2, alu=2, convert=2, special=8),  # as 86 [?]
    89: PipeRates(fma=1, packed_fma=2, half=1, integer_multiply=2, alu=2, convert=2, special=8),
    90: PipeRates(fma=1, packed_fma=2, half=1, integer_multiply=2, alu=2, convert=2, special=8),
    100: PipeRates(fma=1, packed_fma=2, half=2, integer_multiply=2, alu=2, convert=2, special=8),
    103: PipeRates(fma=1, packed_fma=2, half=2, integer_multiply=2, alu=2, convert=2, special=4),  # MUFU doubled [D]
    120: PipeRates(fma=1, packed_fma=2, half=2, integer_multiply=2, alu=1, convert=2, special=8),
    121: PipeRates(fma=1, packed_fma=2, half=2, integer_multiply=2, alu=1, convert=2, special=8),  # as 120 [?]
}

COMPARED = frozenset({80, 86, 89, 90, 100, 120})  # predictions of the others were never held against a measurement


@dataclass(frozen=True, slots=True)
class MemoryPath:
    """The shared-memory and load/store pipe of a multiprocessor, barriers and the choice of a warp."""

    request_cycles: float = 2.0  # least time any request holds the pipe that all four sub-partitions share [L]
    wavefront_cycles: float = 1.0  # of that pipe for 128 bytes; LDSM.x4 has four [L]
    fill_share: float = 0.5  # fitted: further wavefronts when cp.async data is written to shared memory
    shared_latency: float = 26.0  # fitted: request to result of a 32-bit shared load; [L] says 24
    address_cycles: float = 4.0  # a sub-partition's address unit takes one request in so many cycles [L]
    queue_depth: int = 5  # memory instructions a sub-partition buffers [L]
    reduction_bytes_per_clock: float = 24.0  # fitted: fp32 RED into L2, per multiprocessor
    reduction_backlog: float = 600.0  # cycles the L2 port may lag before reductions stall the pipe [?], see model.md
    barrier_cycles: float = 20.0  # last arrival at BAR.SYNC to release [?]
    special_latency: float = 18.0  # MUFU and conversions, beyond the pipe's own cycles [?]
    tensor_latency: float = 0.0  # the same of HMMA; none where ptxas counts it as stalls, as from sm_80 on [P]
    register_latency: float = 20.0  # S2R, LDC and other reads of variable latency [?]
    local_latency: float = 10.0  # of a refill beyond a shared load's, when L1 hits [?]
    greedy: bool = False  # fitted: loose round robin; [L] says greedy, then youngest


MEMORY_PATH = MemoryPath()
# Turing's shared memory has half the width. All of it [T]; an HMMA takes 14 cycles in a chain, MUFU 15.
TURING_PATH = replace(
    MEMORY_PATH, wavefront_cycles=2.0, shared_latency=22.0, special_latency=7.0, tensor_latency=6.0
)  # fmt: skip

FLOAT = "FFMA FMUL FADD FFMA32I FMUL32I FADD32I"
PACKED_FLOAT = "FFMA2 FMUL2 FADD2"
HALF = "HFMA2 HADD2 HMUL2 HADD2_32I HMUL2_32I HFMA2_32I"
INTEGER_MULTIPLY = "IMAD IMAD32I IMUL IMUL32I IDP"
ALU_OPCODES = """
    BMSK FMNMX FMNMX3 FSEL FSET FSETP FSWZADD HMNMX2 HSET2 HSETP2 I2FP I2IP IABS IADD IADD2 IADD3 IADD32I IMNMX ISCADD
    ISCADD32I ISETP LEA LOP LOP3 LOP32I MOV MOV32I P2R PRMT PSETP SEL SGXT SHF SHL SHR VABSDIFF VABSDIFF4 VHMNMX VIADD
    VIADDMNMX VIMNMX VIMNMX3 FCHK
"""
CONVERT = "F2FP F2IP"
SPECIAL_OPCODES = "MUFU F2F F2I I2F FRND FLO POPC BREV"
VARIABLE_READ = "S2R S2UR CS2R LDC LDCU ULDC R2UR REDUX CREDUX MATCH B2R"
ONE_SLOT = """
    BRA BRX BRXU JMP JMX JMXU CALL RET EXIT KILL NOP BSSY BSYNC BREAK BMOV BPT WARPSYNC WARPSYNC.ALL YIELD NANOSLEEP
    VOTE VOTEU PLOP3 R2P ERRBAR CGAERRBAR MEMBAR FENCE CCTL CCTLL CCTLT ENDCOLLECTIVE ELECT PREEXIT ACQBULK LEPC
    RPCMOV WARPGROUP USETMAXREG SETCTAID GETLMEMBASE SETLMEMBASE DEPBAR LDGDEPBAR BAR
"""
UNIFORM = """
    R2UP UBMSK UBREV UCLEA UFADD UFFMA UFLO UFMNMX UFMUL UFSEL UFSET UFSETP UF2F UF2FP UF2I UF2IP UFRND UI2F UI2FP UI2I
    UIABS UIADD3 UIADD UIMAD UIMNMX UISETP ULEA ULOP ULOP3 ULOP32I UMOV UP2UR UPLOP3 UPOPC UPRMT UPSETP UR2UP USEL USGXT
    USHF USHL USHR UVIADD UVIADDMNMX UVIMNMX UVIMNMX3 UVOTE UVOTEU UVIRTCOUNT UCGABAR_ARV UCGABAR_WAIT UMEMSETS
"""
SHARED_OR_GLOBAL = "LDSM LDS STS STSM SHFL LDL STL LDGSTS LDG LD ST STG RED REDG ATOM ATOMG ATOMS MOVM"
# Copies and barriers of the asynchronous units: nothing in the issue simulation makes a warp wait for them.
ASYNCHRONOUS = (
    "SYNCS UTMALDG UTMASTG UTMAREDG UTMACCTL UTMACMDFLUSH UTMAPF UBLKCP UBLKPF UBLKRED ARRIVES HGMMA IGMMA QGMMA"
)

PIPE_OF = {
    name: pipe
    for pipe, names in (
        (FMA, f"{FLOAT} {PACKED_FLOAT} {HALF} {INTEGER_MULTIPLY}"),
        (ALU, f"{ALU_OPCODES} {CONVERT}"),
        (SPECIAL, SPECIAL_OPCODES),
        (TENSOR_CORE, "HMMA IMMA QMMA"),
        (MEMORY, SHARED_OR_GLOBAL),
        (CONTROL, f"{VARIABLE_READ} {ONE_SLOT} {UNIFORM}"),
    )
    for name in names.split()
}
_FIELD_OF = {
    name: field
    for field, names in (
        ("fma", FLOAT),
        ("packed_fma", PACKED_FLOAT),
        ("half", HALF),
        ("integer_multiply", INTEGER_MULTIPLY),
        ("alu", ALU_OPCODES),
        ("convert", CONVERT),
        ("special", SPECIAL_OPCODES),
    )
    for name in names.split()
}
GLOBAL_MEMORY = frozenset({"STG", "LDGSTS", "LDG", "LD", "RED", "REDG", "ATOM", "ATOMG"})  # through the L2 port
VARIABLE_READS = frozenset(VARIABLE_READ.split())
ASYNCHRONOUS_OPCODES = frozenset(ASYNCHRONOUS.split())


def pipe_rates(sm: int) -> PipeRates:
    """The table of an architecture."""
    if sm not in RATES:
        raise UnknownArchitecture(
            f"no pipe rates for sm_{sm}; flashsmith/sass/rates.py knows {', '.join(f'sm_{k}' for k in sorted(RATES))}"
        )
    return RATES[sm]


def memory_path(sm: int) -> MemoryPath:
    """The memory path of an architecture."""
    return TURING_PATH if sm == 75 else MEMORY_PATH


def pipe_of(base: str) -> int:
    """The pipe of an opcode without suffixes; UnknownOpcode if no table has it.

    >>> pipe_of("FFMA") == FMA
    True
    """
    if base not in PIPE_OF:
        why = (
            "the issue simulation does not model asynchronous units"
            if base in ASYNCHRONOUS_OPCODES
            else "no table has it; add it to flashsmith/sass/rates.py with a pipe and the source of its rate"
        )
        raise UnknownOpcode(f"{base}: {why}")
    return PIPE_OF[base]


def pipe_cycles(base: str, rates: PipeRates) -> float:
    """Cycles an arithmetic opcode (pipe FMA, ALU or SPECIAL) holds its pipe."""
    return float(getattr(rates, _FIELD_OF[base]))
