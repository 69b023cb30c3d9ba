// From the processor's reset to kernel_main(), and the ways into and out of programs.
//
// The kernel is the machine's whole ROM: 64 KiB that end at 4 GiB, where the processor starts. It
// copies itself to RAM at 1 MiB, so that its data can be written, and goes on there in long mode.
// All of RAM is mapped at 0xffff800000000000; programs have the lower half of the addresses.

  .set kernel_base, 0xffff800000100000
  .set rom_base, 0xffff0000
  .set code_at, 0x100000        // where the ROM is copied to
  .set tables_at, 0x400000      // the first page tables: PML4, PDPT and four page directories
  .set boot_stack_top, 0xffff800000400000

  .section .boot, "ax"
  .code16
  .globl entry16
entry16:
  cli
  data32 lgdt %cs:boot_gdt_pointer - kernel_base
  mov %cr0, %eax
  or $1, %eax
  mov %eax, %cr0
  ljmpl $8, $(rom_base + entry32 - kernel_base)

  .balign 8
boot_gdt:
  .quad 0
  .quad 0x00cf9a000000ffff      // 8: 32-bit code
  .quad 0x00cf92000000ffff      // 16: data
  .quad 0x00af9a000000ffff      // 24: 64-bit code
boot_gdt_pointer:
  .word 31
  .long rom_base + boot_gdt - kernel_base

  .code32
entry32:
  mov $16, %eax
  mov %eax, %ds
  mov %eax, %es
  mov %eax, %ss
  mov $rom_base, %esi
  mov $code_at, %edi
  mov $0x4000, %ecx
  cld
  rep movsl

  mov $tables_at, %edi
  xor %eax, %eax
  mov $0x1800, %ecx             // six pages
  rep stosl
  movl $tables_at + 0x1003, tables_at             // PML4[0]: the same as physical, for the switch
  movl $tables_at + 0x1003, tables_at + 256 * 8   // PML4[256]: all of RAM, for the kernel
  movl $tables_at + 0x2003, tables_at + 0x1000
  movl $tables_at + 0x3003, tables_at + 0x1008
  movl $tables_at + 0x4003, tables_at + 0x1010
  movl $tables_at + 0x5003, tables_at + 0x1018
  mov $tables_at + 0x2000, %edi
  mov $0x83, %eax               // present, writable, 2 MiB
1:mov %eax, (%edi)
  add $8, %edi
  add $0x200000, %eax
  jnc 1b

  mov $0x620, %eax              // PAE, OSFXSR, OSXMMEXCPT
  mov %eax, %cr4
  mov $tables_at, %eax
  mov %eax, %cr3
  mov $0xc0000080, %ecx         // EFER: SYSCALL, long mode, no-execute
  mov $0x901, %eax
  xor %edx, %edx
  wrmsr
  mov $0x80010033, %eax         // paging, write protection, FPU errors by exception, protection
  mov %eax, %cr0
  ljmpl $24, $(code_at + entry64 - kernel_base)

  .code64
entry64:
  movabs $high, %rax
  jmp *%rax
high:
  movabs $boot_stack_top, %rsp
  xor %ebp, %ebp
  call kernel_main

  .text
// enter_program(instruction pointer, stack pointer): to ring 3, with clear registers.
  .globl enter_program
enter_program:
  push $0x23                    // SS
  push %rsi
  push $0x202                   // RFLAGS: interrupts on; only a clock interrupts, among threads
  push $0x2b                    // CS
  push %rdi
  xor %eax, %eax
  xor %ebx, %ebx
  xor %ecx, %ecx
  xor %edx, %edx
  xor %esi, %esi
  xor %edi, %edi
  xor %ebp, %ebp
  xor %r8d, %r8d
  xor %r9d, %r9d
  xor %r10d, %r10d
  xor %r11d, %r11d
  xor %r12d, %r12d
  xor %r13d, %r13d
  xor %r14d, %r14d
  xor %r15d, %r15d
  iretq

// SYSCALL comes here on the program's stack, with RIP in rcx and RFLAGS in r11. The kernel uses
// general registers only, so that vectors and tiles stay as they are. What is pushed is the struct
// CallFrame of threads.c.
  .globl system_call_entry
system_call_entry:
  mov %rsp, program_stack(%rip)
  mov kernel_stack(%rip), %rsp
  push program_stack(%rip)
  push %r15
  push %r14
  push %r13
  push %r12
  push %rbp
  push %rbx
  push %rcx
  push %r11
  push %rdi
  push %rsi
  push %rdx
  push %r8
  push %r9
  push %r10
  push %r9                      // the seventh argument of system_call()
  mov %r8, %r9
  mov %r10, %r8
  mov %rdx, %rcx
  mov %rsi, %rdx
  mov %rdi, %rsi
  mov %rax, %rdi
  call system_call
  add $8, %rsp
  .globl leave_system_call
leave_system_call:
  pop %r10
  pop %r9
  pop %r8
  pop %rdx
  pop %rsi
  pop %rdi
  pop %r11
  pop %rcx
  pop %rbx
  pop %rbp
  pop %r12
  pop %r13
  pop %r14
  pop %r15
  pop %rsp
  sysretq

// switch_stacks(where to keep this stack's pointer, the other stack's pointer): returns on the other.
  .globl switch_stacks
switch_stacks:
  push %rbx
  push %rbp
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbp
  pop %rbx
  ret

// A new thread's first switch ends here: its system call, clone(), gives 0.
  .globl start_thread
start_thread:
  xor %eax, %eax
  jmp leave_system_call

// Exceptions: each pushes its number, and zero where the processor pushes no error code.
  .globl exception_entries
  .balign 16
exception_entries:
  .set number, 0
  .rept 33                      // 32 is the clock's interrupt
  .balign 16
  .if number != 8 && (number < 10 || number > 14) && number != 17 && number != 21
  push $0
  .endif
  push $number
  jmp exception_common
  .set number, number + 1
  .endr

exception_common:
  push %r15
  push %r14
  push %r13
  push %r12
  push %r11
  push %r10
  push %r9
  push %r8
  push %rdi
  push %rsi
  push %rbp
  push %rbx
  push %rdx
  push %rcx
  push %rax
  mov %rsp, %rdi
  cld
  call exception
  pop %rax
  pop %rcx
  pop %rdx
  pop %rbx
  pop %rbp
  pop %rsi
  pop %rdi
  pop %r8
  pop %r9
  pop %r10
  pop %r11
  pop %r12
  pop %r13
  pop %r14
  pop %r15
  add $16, %rsp
  iretq

  .bss
program_stack:
  .quad 0
  .globl kernel_stack
kernel_stack:
  .quad 0

  .section .reset, "ax"
  .code16
  jmp entry16

  .section .note.GNU-stack, "", @progbits
