"""Everything a rank keeps between programs: request slots, page table, the recipe's state groups,
publication rows, and their exact bytes (contract: M1-M4, M6).
"""
